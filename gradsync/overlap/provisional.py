"""The provisional step: an update with this rank's own gradients, from which the next micro-batches go on.

Nobody notices it: users' step hooks do not run, random numbers that are drawn after it do not change, and what it
changes is saved first.

Private in torch (read in torch 2.13; tests/overlap/test_provisional.py fails when it changes):
`_optimizer_step_pre_hooks` and `_optimizer_step_post_hooks` of an optimizer, `_global_optimizer_pre_hooks` and
`_global_optimizer_post_hooks` of torch.optim.optimizer, all of which its `step` reads as it runs; a group's
`_get_sequence_number_for_group`, which counts its collectives; and TorchDispatchMode, which sees each operation.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
import torch.optim.optimizer as torch_optimizer
from torch import nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

from gradsync._errors import GradSyncError
from gradsync.functional import all_finite, bare_optimizer, clip, discard, normalise, owned
from gradsync.overlap.saved import Saved


def owned_trainable(optimizers: Sequence[Optimizer]) -> list[nn.Parameter]:
    """The trainable parameters of the optimizers, each once."""
    return [parameter for parameter in owned(optimizers) if parameter.requires_grad]


def provisional_step(
    optimizers: Sequence[Optimizer],
    *,
    factor: float | None,
    clip_norm: float | None = None,
    nonfinite: Literal["step", "skip", "raise"] = "step",
    groups: Iterable[dist.ProcessGroup] = (),
    spare: Saved | None = None,
) -> Saved | None:
    """Step with the gradients that the parameters have; return what undoes the step, or None if none was made.

    The gradients are this rank's own sums, and are gone afterwards. They are multiplied by `factor`, which makes them
    this rank's mean, and then clipped by their own norm. No step is made if `factor` is None, which means that the
    gradients weigh nothing, or if they are not finite and `nonfinite` is not "step". The memory of `spare` is used
    again. A step that sends anything to the ranks of `groups` is an error. If the step raises, it is undone.
    """
    optimizers = [bare_optimizer(optimizer) for optimizer in optimizers]
    parameters = owned_trainable(optimizers)
    try:
        if factor is None or all(parameter.grad is None for parameter in parameters):
            return None
        normalise(parameters, factor)
        if clip_norm is not None:
            clip(parameters, clip_norm)
        if nonfinite != "step" and not all_finite(parameters):
            return None
        saved = Saved.of(optimizers, spare)
        try:
            _step(optimizers, parameters, list(groups))
        except BaseException:
            saved.after_step().put_back()
            raise
        return saved.after_step()
    finally:
        discard(parameters)


def _step(optimizers: Sequence[Optimizer], parameters: Sequence[nn.Parameter], groups: list[dist.ProcessGroup]) -> None:
    before = _numbers_sent(groups)
    listening = nullcontext() if before is not None else _Collectives()  # type: ignore[no-untyped-call]
    with unnoticed(optimizers, parameters), listening as collectives:
        for optimizer in optimizers:
            # The instance's step: a scheduler wraps it, to know whether the optimizer has stepped before it.
            optimizer.step()
    if before != _numbers_sent(groups) or (collectives is not None and collectives.num_seen):
        raise GradSyncError(communicates(optimizers))


def _numbers_sent(groups: Iterable[Any]) -> list[int] | None:
    """How many collectives each group has begun; None if a backend does not count them."""
    try:
        return [group._get_sequence_number_for_group() for group in groups]
    except RuntimeError:  # torch 2.13: "does not yet support sequence numbers", of backends that are not torch's own
        return None


class _Collectives(TorchDispatchMode):
    """Counts the collectives that begin inside. It sees every operation, which is slower than to ask the groups."""

    num_seen = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num_seen += func.namespace in {"c10d", "_c10d_functional"}
        return func(*args, **(kwargs or {}))


@contextmanager
def unnoticed(optimizers: Sequence[Optimizer], parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """Inside, no step hooks run, neither optimizers' nor global ones. Random numbers are afterwards as before."""
    with ExitStack() as stack:
        for optimizer in optimizers:
            stack.enter_context(_instead(optimizer, "_optimizer_step_pre_hooks"))
            stack.enter_context(_instead(optimizer, "_optimizer_step_post_hooks"))
        stack.enter_context(_instead(torch_optimizer, "_global_optimizer_pre_hooks"))
        stack.enter_context(_instead(torch_optimizer, "_global_optimizer_post_hooks"))
        devices = {parameter.device for parameter in parameters if parameter.device.type != "cpu"}
        for kind in {"cuda", *(device.type for device in devices)}:
            stack.enter_context(torch.random.fork_rng([one for one in devices if one.type == kind], device_type=kind))
        yield


def communicates(optimizers: Sequence[Optimizer]) -> str:
    """The text of the error for optimizers that communicate."""
    names = ", ".join(sorted({type(optimizer).__name__ for optimizer in optimizers}))
    return (
        "With overlap each rank makes a provisional step of its own, in which it must not wait for other ranks, but a "
        f"step of {names} communicates. Use an optimizer that steps by itself, or overlap=0."
    )


@contextmanager
def _instead(owner: Any, name: str) -> Iterator[None]:
    """Replace the hooks of `owner` by none. Their dict is kept, because handles remove themselves from it."""
    found = cast("OrderedDict[int, Any]", getattr(owner, name))
    if not found:
        yield
        return
    setattr(owner, name, OrderedDict())
    try:
        yield
    finally:
        setattr(owner, name, found)
