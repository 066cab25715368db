"""The update at a boundary, in the right order."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import MethodType
from typing import Any, Literal, NamedTuple

import torch
from torch.amp import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from gradsync._errors import GradSyncError
from gradsync.functional._update.grad_scaler import found_inf, is_scaling, unscale
from gradsync.functional._update.gradients import Spread, all_finite, clip, discard, normalise
from gradsync.functional._update.optimizers import bare_optimizer, owned
from gradsync.functional._update.profiler_ranges import named_range

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
    spread: Spread | None = None,
) -> Update:
    """Unscale, normalise by `factor`, clip, step, update the scaler, step the schedulers, and zero the gradients.

    The gradients are synchronised already. The schedulers step only if the optimizers really stepped. `grad_norm` is
    over all optimizers, from before clipping; None without `clip_norm`. `spread` is explained at `norm`.

    >>> weight = torch.nn.Parameter(torch.ones(1)); optimizer = torch.optim.SGD([weight], lr=1.0)
    >>> weight.grad = torch.tensor([0.5])
    >>> update([optimizer], clip_norm=1.0), weight.data, weight.grad
    (Update(stepped=True, grad_norm=tensor(0.5000)), tensor([0.5000]), None)
    """
    made = step_optimizers(
        optimizers, scaler=scaler, clip_norm=clip_norm, factor=factor, nonfinite=nonfinite, spread=spread
    )
    try:
        if made.stepped:
            move(schedulers, optimizers)
    finally:
        zero(optimizers)
    refuse_nonfinite(made, nonfinite)
    return made


def step_optimizers(
    optimizers: Sequence[Optimizer],
    *,
    scaler: GradScaler | None = None,
    clip_norm: float | None = None,
    factor: float = 1.0,
    nonfinite: NonFinite = "step",
    spread: Spread | None = None,
) -> Update:
    """The first half of `update`, up to the optimizers' step. The gradients are kept."""
    with named_range("gradsync.update"):
        parameters = owned(optimizers)
        if is_scaling(scaler):
            unscale(scaler, optimizers, parameters, spread)
        normalise(parameters, factor)
        grad_norm = None if clip_norm is None else clip(parameters, clip_norm, spread=spread)
        finite = nonfinite == "step" or all_finite(parameters, spread=spread)
        return Update(_step(optimizers, scaler, finite=finite), grad_norm)


def move(schedulers: Iterable[Any], optimizers: Sequence[Optimizer]) -> None:
    """Step the schedulers, once an update. Raise for a scheduler that steps the optimizers as well."""
    for scheduler in schedulers:
        if isinstance(scheduler, torch.optim.lr_scheduler.LRScheduler):
            scheduler.step()
            continue
        with _no_step_by(scheduler, optimizers):
            if counts_updates(scheduler):
                updates = scheduler.__dict__.get("_gradsync_updates", 0) + 1
                scheduler.__dict__["_gradsync_updates"] = updates
                scheduler.step_update(updates)
            else:
                scheduler.step()


@contextmanager
def _no_step_by(scheduler: object, optimizers: Iterable[Optimizer]) -> Iterator[None]:
    """These optimizers have stepped: a second step inside is an error."""

    def refuse(*_: object) -> None:
        raise GradSyncError(
            f"A scheduler's step() sets learning rates, and the boundary has stepped the optimizer before it, but that "
            f"of {type(scheduler).__name__} steps the optimizer once more. Leave that out of it, or use "
            "gradsync.sync_every, where the update is yours."
        )

    with ExitStack() as stack:
        for optimizer in map(bare_optimizer, optimizers):
            stack.callback(optimizer.register_step_pre_hook(refuse).remove)
        yield


def zero(optimizers: Iterable[Optimizer]) -> None:
    """Set the gradients to None."""
    for optimizer in map(bare_optimizer, optimizers):
        if type(optimizer).zero_grad is torch.optim.Optimizer.zero_grad and "zero_grad" not in vars(optimizer):
            discard(owned([optimizer]))  # like torch's zero_grad, without its profiler entries, which cost more
        else:
            optimizer.zero_grad()
            discard(owned([optimizer]))


def refuse_nonfinite(made: Update, nonfinite: NonFinite) -> None:
    """Raise if the update was not made, under `nonfinite="raise"`."""
    if not made.stepped and nonfinite == "raise":
        raise GradSyncError(
            "The gradients of a window must be finite under nonfinite='raise', but an inf or a NaN came. The window is "
            "discarded on every rank; look for its data, or use nonfinite='skip'."
        )


def check_steppable(one: Any) -> None:
    """Raise if the `step` of an optimizer or scheduler needs an argument: the boundary has none to give."""
    if counts_updates(one):
        return
    needed = _needed(one)
    if needed and hasattr(one, "step_update"):
        raise TypeError(
            f"The boundary calls step_update(updates) of this {type(one).__name__}, but it counts epochs, and would "
            "never move. Make it with t_in_epochs=False, or keep it out of the decorated call and step it after each "
            "epoch."
        )
    if needed:
        raise TypeError(
            f"The boundary calls step() without arguments, but {type(one).__name__}.step needs {needed!r}. "
            "Keep it out of the decorated call and step it yourself, or use gradsync.sync_every, where the update is "
            "yours."
        )


def counts_updates(scheduler: Any) -> bool:
    """Whether it is a scheduler of timm that takes the number of updates (`step_update`)."""
    return callable(getattr(scheduler, "step_update", None)) and not getattr(scheduler, "t_in_epochs", True)


def _needed(one: Any) -> str | None:
    """The name of the first argument of `step` without a default."""
    kinds = {inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY}
    # That of the class: a scheduler of torch's puts a wrapper on its optimizer.
    step = MethodType(type(one).step, one) if hasattr(type(one), "step") else one.step
    parameters = inspect.signature(step).parameters.values()
    return next((p.name for p in parameters if p.default is p.empty and p.kind in kinds), None)


def _step(optimizers: Sequence[Optimizer], scaler: GradScaler | None, *, finite: bool) -> bool:
    """Step all optimizers, or none of them."""
    odd = found_inf(scaler, optimizers) if is_scaling(scaler) else None
    stepped = finite and not odd
    try:
        if stepped:
            for optimizer in optimizers:
                _step_one(optimizer)
    except BaseException:
        if is_scaling(scaler):
            for optimizer in optimizers:  # else the scaler refuses to unscale the next window's gradients
                scaler._per_optimizer_states.pop(id(optimizer), None)
        raise
    if is_scaling(scaler) and odd is not None:
        scaler.update()
    return stepped


def _step_one(optimizer: Any) -> None:
    """Step it. Raise if it is a wrapper that has not stepped the optimizer inside."""
    inner = bare_optimizer(optimizer)
    if inner is optimizer or getattr(optimizer, "scaler", None) is not None:  # which may skip a step by itself
        optimizer.step()
        return
    stepped: list[None] = []
    handle = inner.register_step_post_hook(lambda *_: stepped.append(None))
    try:
        optimizer.step()
    finally:
        handle.remove()
    if not stepped:
        raise GradSyncError(
            f"At a boundary the optimizer must step, but {type(optimizer).__name__}.step() did not step the "
            f"{type(inner).__name__} inside. Leave `with accelerator.accumulate(...)` out around the call, and "
            "make the Accelerator with gradient_accumulation_steps=1: gradsync accumulates."
        )
