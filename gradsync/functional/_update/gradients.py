"""Arithmetic on gradients: normalise, norm, clip, finite, discard. Functions of parameters, without state."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from gradsync._errors import GradSyncError
from gradsync.engines import is_in_pieces
from gradsync.ranks.group import several_ranks

Spread: TypeAlias = Mapping[int, dist.ProcessGroup]

WHOLE: Spread = MappingProxyType({})


def normalise(parameters: Iterable[nn.Parameter], factor: float) -> None:
    """Multiply the gradients by `factor`, in place; 1.0 costs nothing.

    >>> weight = torch.nn.Parameter(torch.zeros(2)); weight.grad = torch.ones(2)
    >>> normalise([weight], 0.5); weight.grad
    tensor([0.5000, 0.5000])
    """
    if factor == 1.0:
        return
    for layout, gradients in _by_layout(parameters, WHOLE).items():
        if layout.is_sparse:
            for gradient in gradients:
                gradient.mul_(factor)
        else:
            torch._foreach_mul_(gradients, factor)


def norm(parameters: Iterable[nn.Parameter], *, spread: Spread | None = None) -> torch.Tensor:
    """The norm of all gradients together: plain tensors and DTensors of any meshes.

    `FullyShardedDataParallel` spreads plain gradients over ranks in pieces. `spread` has those ranks, by the id of the
    parameter: `run.fitting_team().spread`. Without it such parameters are an error.
    """
    parts: list[torch.Tensor] = []
    for layout, gradients in _by_layout(parameters, spread).items():
        part = _full(get_total_norm([_values(gradient) for gradient in gradients]))
        if layout.ranks is not None:
            square = part.double().square()
            dist.all_reduce(square, group=layout.ranks)
            part = square.sqrt().to(part.dtype)
        parts.append(part)
    if not parts:
        return torch.zeros((), device="cpu")
    if len(parts) == 1:
        return parts[0]
    total: torch.Tensor = torch.linalg.vector_norm(torch.stack([part.to(parts[0]) for part in parts]))
    return total


def clip(parameters: Iterable[nn.Parameter], max_norm: float, *, spread: Spread | None = None) -> torch.Tensor:
    """Scale the gradients down to a norm of at most `max_norm`; returns the norm from before.

    >>> weight = torch.nn.Parameter(torch.zeros(2)); weight.grad = torch.tensor([3.0, 4.0])
    >>> clip([weight], 1.0), weight.grad
    (tensor(5.), tensor([0.6000, 0.8000]))
    """
    parameters = list(parameters)
    total = norm(parameters, spread=spread)
    # torch's function, for one kind at a time: it takes neither sparse gradients nor a mixture with DTensors.
    alike: defaultdict[_Layout, list[nn.Parameter]] = defaultdict(list)
    for parameter in parameters:
        if parameter.grad is not None:
            alike[_Layout.of(parameter.grad)].append(parameter)
    for layout, members in alike.items():
        if layout.is_sparse:
            normalise(members, min(1.0, max_norm / (float(total) + 1e-6)))
        else:
            clip_grads_with_norm_(members, max_norm, total)
    return total


def all_finite(parameters: Iterable[nn.Parameter], *, spread: Spread | None = None) -> bool:
    """Whether no gradient has an inf or a NaN, on any rank that has a piece of it. One host synchronisation."""
    flags: list[torch.Tensor] = []
    for layout, gradients in _by_layout(parameters, spread).items():
        pieces = [piece for piece in map(values_here, gradients) if piece.numel()]
        # The largest element cannot overflow, which a 2-norm can. A flag is sent, because MAX may lose a NaN.
        odd = (~torch.isfinite(get_total_norm(pieces, float("inf")))).to(gradients[0].device, torch.float32)
        for group in layout.groups():
            dist.all_reduce(odd, op=dist.ReduceOp.MAX, group=group)
        flags.append(odd)
    return not flags or not torch.stack([flag.to(flags[0], non_blocking=True) for flag in flags]).any()


def discard(parameters: Iterable[nn.Parameter]) -> None:
    """Drop the gradients, as `zero_grad(set_to_none=True)` does."""
    for parameter in parameters:
        parameter.grad = None


class _Layout(NamedTuple):
    """Where gradients lie: on a mesh, in pieces on ranks, or whole on each rank. A foreach call takes those of one."""

    mesh: Any
    is_sparse: bool
    ranks: dist.ProcessGroup | None

    @classmethod
    def of(cls, gradient: torch.Tensor, ranks: dist.ProcessGroup | None = None) -> _Layout:
        return cls(getattr(gradient, "device_mesh", None), gradient.is_sparse, ranks)

    def groups(self) -> list[dist.ProcessGroup]:
        """The groups over which to reduce, one after another, to have all of a gradient."""
        if self.mesh is not None:
            return [self.mesh.get_group(dimension) for dimension in range(self.mesh.ndim)]
        return [] if self.ranks is None else [self.ranks]


def _by_layout(parameters: Iterable[nn.Parameter], spread: Spread | None) -> dict[_Layout, list[torch.Tensor]]:
    """The gradients by layout. A rank without a piece takes part with an empty piece."""
    layouts: defaultdict[_Layout, list[torch.Tensor]] = defaultdict(list)
    parameters = list(parameters)
    spread = known_spread(parameters, spread)
    for parameter in parameters:
        gradient, ranks = parameter.grad, spread.get(id(parameter))
        if gradient is None and ranks is not None:
            gradient = parameter.detach().new_empty(0)
        if gradient is not None:
            layouts[_Layout.of(gradient, ranks)].append(gradient)
    return layouts


def known_spread(parameters: Iterable[nn.Parameter], spread: Spread | None) -> Spread:
    """`spread`, or an error where it was left out and is needed."""
    if spread is None and several_ranks() and any(map(is_in_pieces, parameters)):
        raise GradSyncError(
            "The norm of gradients that FullyShardedDataParallel has sharded, and whether they are finite, take the "
            "pieces of all ranks, but spread= does not say which ranks these are. Pass "
            "spread=run.fitting_team().spread."
        )
    return WHOLE if spread is None else spread


def values_here(gradient: torch.Tensor) -> torch.Tensor:
    """What this rank has of a gradient, as a plain tensor."""
    return _values(local_of(gradient))


def local_of(gradient: torch.Tensor) -> torch.Tensor:
    """What this rank has of a gradient; of a `DTensor` another tensor than itself."""
    local: Callable[[], torch.Tensor] | None = getattr(gradient, "to_local", None)
    return gradient if local is None else local()


def is_there(gradient: torch.Tensor | None) -> bool:
    """Whether there is a gradient, and it is not all zeros, as `zero_grad(set_to_none=False)` leaves it."""
    return gradient is not None and bool(values_here(gradient).any())


def _values(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.coalesce().values() if gradient.is_sparse else gradient


def _full(total: torch.Tensor) -> torch.Tensor:
    """The whole norm: that of DTensors is itself a DTensor."""
    full: Callable[[], torch.Tensor] | None = getattr(total, "full_tensor", None)
    return total if full is None else full()
