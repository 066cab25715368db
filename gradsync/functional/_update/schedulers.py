"""Schedulers, torch's and others' (timm's count updates): whether the boundary can step them, and how it does."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import MethodType
from typing import Any

import torch
from torch.optim import Optimizer

from gradsync._errors import GradSyncError
from gradsync.functional._update.optimizers import bare_optimizer


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
