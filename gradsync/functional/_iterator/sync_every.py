"""`sync_every`: windows for a loop that keeps its own backward and update."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from copy import copy
from typing import Any, TypeVar, overload

from torch import nn

from gradsync.functional._iterator.body_watch import BodyWatch
from gradsync.functional._iterator.micro_step import MicroStep
from gradsync.functional._loop.counted_items import length
from gradsync.functional._loop.loop import Loop
from gradsync.functional._team.no_sync import check_modules
from gradsync.functional._window.run import Run
from gradsync.functional._window.terms import Steps, Terms, Who
from gradsync.ranks.group import require_group
from gradsync.ranks.meet import insist, meet

T = TypeVar("T")


@overload
def sync_every(model: nn.Module | Sequence[nn.Module], steps: Steps) -> Iterator[MicroStep]: ...
@overload
def sync_every(
    model: nn.Module | Sequence[nn.Module], steps: Steps, iterable: Iterable[T]
) -> Iterator[tuple[MicroStep, T]]: ...
def sync_every(
    model: nn.Module | Sequence[nn.Module], steps: Steps, iterable: Iterable[T] | None = None
) -> Iterator[MicroStep] | Iterator[tuple[MicroStep, T]]:
    """Micro-steps that synchronise once every `steps`, for a loop that keeps its own backward and update.

    With an iterable it yields `(MicroStep, item)` and closes the tail exactly, also where ranks have different numbers
    of items. Without an iterable it is endless, to zip with a loop. What backwards in the loop's body leave stays
    local, except in the last step of a window. However the loop is left, the model's engine is restored.

    >>> model = torch.nn.Linear(1, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> for step, batch in gradsync.sync_every(model, 2, torch.ones(5, 3, 1)):
    ...     step.backward(model(batch).square().mean())
    ...     if step.last:
    ...         print(step.window, step.index)
    ...         optimizer.step()
    ...         optimizer.zero_grad()
    0 1
    1 1
    2 0
    """
    models = check_modules(model, "sync_every")
    run = Run("sync_every", Terms(steps, repeats="always", keeps_losses=False))
    require_group("sync_every")
    return _steps(run, models, iterable)


def _steps(run: Run, models: Sequence[nn.Module], iterable: Iterable[Any] | None) -> Iterator[Any]:
    who, watch = Who(models), BodyWatch(run)  # the models are alive as long as the loop
    run.who, last = who, None
    loop = Loop("sync_every", length(iterable), lambda: [run])
    loop.expect_one_call(run)
    try:
        while iterable is None:
            place = run.start(who)
            if place.window == place.index == 0:
                insist(meet(run.fitting_team().group, "the start of sync_every", {"steps": place.size}))
            with watch.at(place):
                yield MicroStep(place, watch)
        for item in loop.items(iterable):
            last = _kept(item)
            with watch.at(place := run.start(who, loop)):
                yield MicroStep(place, watch), item
        for _, place in loop.rest():
            with watch.at(place):
                yield MicroStep(place, watch), _kept(last)
    except BaseException as error:
        watch.leave(error, sys._getframe(0).f_back)
        raise
    finally:
        watch.end_loop()
        loop.end()
    run.abandon()


def _kept(item: Any) -> Any:
    """The item as it is now: a body may take something out of a dict or a list, and a replay needs it again."""
    return copy(item) if type(item) is dict or type(item) is list else item
