"""The loss in what a step function returned, and `LossSum`, with its counts."""

from __future__ import annotations

import math
from collections.abc import Mapping, MutableMapping, MutableSequence, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from gradsync._errors import GradSyncError

T = TypeVar("T")

NO_LOSS, MEANS, SUMS, PLAIN = 0.0, 1.0, 2.0, 3.0  # the kinds of losses, as ranks tell each other
IN_WORDS = {NO_LOSS: None, MEANS: "a mean", SUMS: "a LossSum", PLAIN: "a plain backward"}


@dataclass(frozen=True, eq=False)
class LossSum:
    """A loss that is a sum, and what it is a sum over: tokens, pixels, samples.

    The window's gradient is then that of all sums over all counts, over every micro-batch of every rank: the mean per
    token, however the tokens are spread. `count` may be an int, a float or a tensor, and zero.

    >>> loss = LossSum(torch.tensor(6.0, requires_grad=True), count=3)
    >>> loss.mean
    tensor(2., grad_fn=<DivBackward0>)
    """

    loss: torch.Tensor
    count: int | float | torch.Tensor

    def __post_init__(self) -> None:
        if not isinstance(self.loss, torch.Tensor):
            raise TypeError(
                f"LossSum(loss, count) needs the loss first, a tensor, but what came first is of type "
                f"{type(self.loss).__name__}. Write LossSum(loss, count), or name them: LossSum(loss=..., count=...)."
            )
        check_count(self.count)

    @property
    def mean(self) -> torch.Tensor:
        """The loss per counted thing, for a log."""
        return self.loss / self.count


def check_count(count: object) -> None:
    """Raise unless a loss can be a sum over `count`; its value is looked at later, by all ranks together."""
    if isinstance(count, torch.Tensor):
        if count.numel() != 1 or count.is_complex():
            raise TypeError(
                f"The count of a LossSum must be one real number, but it is a tensor of shape {tuple(count.shape)} and "
                f"{count.dtype}. Pass its .sum()."
            )
    elif isinstance(count, bool) or not isinstance(count, int | float):
        raise TypeError(
            f"The count of a LossSum must be an int, a float or a tensor, but it is of type {type(count).__name__}. "
            "Pass what the loss is a sum over, such as the number of tokens."
        )


_LOSSES = (torch.Tensor, LossSum)  # in every call: a union would be built anew each time


def find_loss(returned: object) -> torch.Tensor | LossSum:
    """The loss in what a step function returned.

    >>> find_loss((torch.tensor(1.0, requires_grad=True), "logits"))
    tensor(1., requires_grad=True)
    """
    if isinstance(returned, _LOSSES):
        return returned
    found: object
    if isinstance(returned, Mapping):
        found = returned.get("loss")
    elif isinstance(returned, tuple | list) and not hasattr(returned, "loss"):
        found = returned[0] if returned else None
        _check_single(returned)
    else:
        found = getattr(returned, "loss", None)
    if not isinstance(found, _LOSSES):
        raise GradSyncError(
            "A step function must return its loss: a tensor, a LossSum, a tuple or list that begins with one, a "
            f'mapping with "loss", or an object with .loss; but what came is {_describe(returned)}. '
            "Return the unscaled loss."
        )
    return found


def _check_single(returned: Sequence[object]) -> None:
    """Raise for several losses: only the first would be trained."""
    for other in returned[1:2]:
        inner = other.loss if isinstance(other, LossSum) else other
        if isinstance(inner, torch.Tensor) and inner.numel() == 1 and inner.requires_grad:
            raise GradSyncError(
                "A step function must return one loss, first in a tuple or list, but the second item is a loss, too: a "
                "scalar that needs a gradient. Return their sum first, and .detach() what is only to be looked at."
            )


def tensor_of(loss: torch.Tensor | LossSum) -> torch.Tensor:
    """The tensor in a loss."""
    return loss.loss if isinstance(loss, LossSum) else loss


def check_loss(loss: torch.Tensor | LossSum) -> torch.Tensor:
    """The tensor from which the backward of a loss runs; raises if it cannot."""
    loss = loss.loss if isinstance(loss, LossSum) else loss  # in each call: not by tensor_of
    if not isinstance(loss, torch.Tensor):
        raise GradSyncError(
            f"The loss must be a tensor, but it is of type {type(loss).__name__}. Give the loss itself: not its "
            ".item(), and nothing beside it."
        )
    if loss.numel() != 1:
        raise GradSyncError(
            f"The loss must be a scalar or have one element, but its shape is {tuple(loss.shape)}. Return its mean, or "
            "its sum in a LossSum."
        )
    if loss.is_complex():
        raise GradSyncError(
            f"The loss must be a real number, but it is of {loss.dtype}. Return its .real, or its .abs()."
        )
    if not loss.requires_grad:
        raise no_gradient("it has requires_grad=False")
    return loss


def no_gradient(came: str) -> GradSyncError:
    """Nothing can be trained with this loss."""
    return GradSyncError(
        f"The loss must need a gradient, but {came}. Compute it from the model's parameters, of which at least one is "
        "not frozen, and neither under torch.no_grad() nor after .detach(). To evaluate, call the model, or the "
        "undecorated function: train_step.__wrapped__(...)."
    )


def detach(returned: T, loss: torch.Tensor | LossSum) -> T:
    """The same object, its loss detached; an equal one where the loss is a view or a leaf, and must stay as it is."""
    tensor = tensor_of(loss)
    if not tensor._is_view() and not tensor.is_leaf:
        tensor.detach_()
        return returned
    # A view cannot be detached in place, and a parameter must not be: put its detached self where it stands.
    plain: Any = LossSum(tensor.detach(), loss.count) if isinstance(loss, LossSum) else tensor.detach()
    if returned is loss:
        return plain  # type: ignore[no-any-return]
    if isinstance(returned, MutableMapping):
        returned["loss"] = plain
    elif isinstance(returned, MutableSequence):
        returned[0] = plain
    elif type(returned) is tuple:
        return (plain, *returned[1:])  # type: ignore[return-value, index]
    elif not tensor.is_leaf:
        torch.utils.swap_tensors(tensor, tensor.detach())  # for a named tuple, a frozen class, a proxy
    return returned


def _describe(returned: object) -> str:
    if isinstance(returned, Mapping):
        return f"a {type(returned).__name__} with the keys {sorted(map(str, returned))}"
    if isinstance(returned, tuple | list):
        return f"a {type(returned).__name__} of {', '.join(type(one).__name__ for one in returned) or 'nothing'}"
    return "None" if returned is None else f"of type {type(returned).__name__}"


def widest(tensor: torch.Tensor) -> torch.dtype:
    """The floating dtype for sums on this tensor's device; mps has no float64."""
    return torch.float32 if tensor.device.type == "mps" else torch.float64


class Count:
    """A sum of counts: integers are added exactly, others in float64, and tensors on their device.

    Counts are read at once: a tensor that is refilled later does not change the sum.
    """

    __slots__ = ("_number", "_on_device")

    def __init__(self) -> None:
        self._number: int | float = 0
        self._on_device: dict[tuple[torch.device, torch.dtype], torch.Tensor] = {}

    def add(self, count: float | torch.Tensor) -> None:
        """Add one count."""
        if not isinstance(count, torch.Tensor):
            self._number += _checked(count)
        elif count.device.type == "cpu":
            self._number += _checked(count.item())
        else:
            wide = widest(count) if count.is_floating_point() else torch.int64
            wider = count.detach().reshape(()).to(wide)
            wider = wider.masked_fill(wider < 0, -(2**62) if wide is torch.int64 else math.nan)  # a copy, too
            place = wider.device, wide
            self._on_device[place] = self._on_device.get(place, 0) + wider

    @property
    def total(self) -> float | torch.Tensor:
        """The sum: a tensor if any count is on a device, else a number. NaN if a count was negative or NaN."""
        wide = [tensor.to(widest(tensor)) for tensor in self._on_device.values()]
        return sum([one.to(wide[0].device) for one in wide], start=self._number) if wide else float(self._number)

    def state(self) -> int | float:
        """The sum as a number, for a checkpoint; waits for the device."""
        on_device = (tensor.item() for tensor in self._on_device.values())
        return sum(on_device, start=self._number)

    def load(self, number: float) -> None:
        """Go on from a number that `state` gave."""
        self._number, self._on_device = number, {}


def _checked(number: float) -> float:
    # The table tells all ranks of a wrong count, and all of them raise. To raise here would leave the others waiting.
    return number if number >= 0 else math.nan
