"""The boundary's update, in the one right order."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Literal, NamedTuple

import torch

from gradsync._errors import GradSyncError
from gradsync.functional._gradients import WHOLE, all_finite, clip, normalise
from gradsync.functional._micro_batch import named_range

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import nn
    from torch.amp import GradScaler
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LRScheduler

    from gradsync.functional._gradients import Spread

NonFinite = Literal["step", "skip", "raise"]


class Update(NamedTuple):
    """What an update did."""

    stepped: bool
    grad_norm: torch.Tensor | None


def update(
    optimizers: Sequence[Optimizer],
    *,
    schedulers: Sequence[LRScheduler] = (),
    scaler: GradScaler | None = None,
    clip_norm: float | None = None,
    factor: float = 1.0,
    nonfinite: NonFinite = "step",
    spread: Spread = WHOLE,
) -> Update:
    """Unscale, normalise by `factor`, clip, step, update the scaler, step the schedulers, and zero the gradients.

    The gradients are synchronised already. The schedulers move only if the optimizers really stepped. `grad_norm` is
    over all optimizers and from before clipping; None without `clip_norm`. `spread` is that of `norm`.

    >>> weight = torch.nn.Parameter(torch.ones(1)); optimizer = torch.optim.SGD([weight], lr=1.0)
    >>> weight.grad = torch.tensor([0.5])
    >>> update([optimizer], clip_norm=1.0), weight.data, weight.grad
    (Update(stepped=True, grad_norm=tensor(0.5000)), tensor([0.5000]), None)
    """
    with named_range("gradsync.update"):
        parameters = list(owned(optimizers))
        if scaler is not None and scaler.is_enabled():
            _ensure_scale(scaler, parameters, spread)
            for optimizer in optimizers:
                scaler.unscale_(optimizer)
        normalise(parameters, factor)
        grad_norm = None if clip_norm is None else clip(parameters, clip_norm, spread=spread)
        stepped = True
        if nonfinite != "step" and not all_finite(parameters, spread=spread):
            stepped = False
        if stepped or scaler is not None:
            stepped = _step(optimizers, scaler, skip=not stepped)
        if stepped:
            for scheduler in schedulers:
                scheduler.step()
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=True)
    if not stepped and nonfinite == "raise":
        raise GradSyncError(
            "The gradients of a window must be finite under nonfinite='raise', but an inf or a NaN came. The window is "
            "discarded on every rank; look for its data, or use nonfinite='skip'."
        )
    return Update(stepped, grad_norm)


def owned(optimizers: Sequence[Optimizer]) -> Iterator[nn.Parameter]:
    """The parameters of the optimizers, each once."""
    seen: set[int] = set()
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if id(parameter) not in seen:
                    seen.add(id(parameter))
                    yield parameter


def check_steppable(one: Optimizer | LRScheduler) -> None:
    """Raise if the `step` of an optimizer or scheduler needs an argument, which the boundary does not have."""
    step: Callable[..., object] = type(one).step
    needed = [
        parameter.name
        for parameter in list(inspect.signature(step).parameters.values())[1:]
        if parameter.default is parameter.empty
        and parameter.kind in {parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY}
    ]
    if needed:
        raise TypeError(
            f"The boundary calls step() without arguments, but {type(one).__name__}.step needs {needed[0]!r}. "
            "Keep it out of the decorated call and step it yourself, or use gradsync.sync_every, where the update is "
            "yours."
        )


def _step(optimizers: Sequence[Optimizer], scaler: GradScaler | None, *, skip: bool) -> bool:
    if scaler is None or not scaler.is_enabled():
        if not skip:
            for optimizer in optimizers:
                optimizer.step()
        return not skip
    # The public way to learn whether a scaler let its optimizers step; fused ones are called either way.
    before = scaler.get_scale()
    if not skip:
        for optimizer in optimizers:
            scaler.step(optimizer)
    scaler.update()
    return not skip and scaler.get_scale() >= before


def _ensure_scale(scaler: GradScaler, parameters: Sequence[nn.Parameter], spread: Spread) -> None:
    """A rank that had no micro-batch in any window yet has a scaler that never scaled, and would not unscale."""
    if not spread.keys().isdisjoint(map(id, parameters)) and not hasattr(scaler, "process_group"):
        raise GradSyncError(
            "Gradients that FullyShardedDataParallel has sharded need a scaler that asks all ranks whether one came "
            f"upon an inf, but the scaler is a {type(scaler).__name__}, which asks its own rank. Use "
            "torch.distributed.fsdp.sharded_grad_scaler.ShardedGradScaler."
        )
    if len({hasattr(p.grad, "device_mesh") for p in parameters if p.grad is not None}) > 1:
        raise GradSyncError(
            "A GradScaler can unscale either DTensors or plain gradients, but the parameters of this update have both. "
            "Call fully_shard on the whole model, its root included, so that all of them are DTensors."
        )
    if scaler._scale is None:
        scaler.scale(torch.zeros((), device=parameters[0].device))
