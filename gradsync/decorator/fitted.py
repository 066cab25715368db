"""A call with `fit`: its body and its backward, in as many parts as memory needs."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch

from gradsync._errors import GradSyncError
from gradsync.engines import find
from gradsync.parts import Fit, Work, run_in_parts
from gradsync.ranks.lost import is_lost

if TYPE_CHECKING:
    from collections.abc import Callable

    from gradsync.decorator.updates import Updates
    from gradsync.decorator.watches import GradientWatch
    from gradsync.functional import Begun, Closing, LossSum, Place, Team
    from gradsync.parts import Cut


class Fitted:
    """What `fit` remembers between the micro-batches of one call."""

    def __init__(self, fit: bool | Cut, updates: Updates, watch: GradientWatch) -> None:  # noqa: FBT001 - its user's
        self._fit = Fit(fit, name=updates.run.name)
        self._updates = updates
        self._watch = watch
        self._team: Team | None = None  # which is known to allow it

    def micro_batch(
        self, place: Place, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, Closing | None]:
        """Run the user's function and its backward; returns what it returned (None where it is dropped)."""
        run, record = self._updates.run, self._updates.record
        team = run.fit()
        if place.index == 0 or team is not self._team:
            models = run.who.models
            self._fit.open(models, () if team is self._team else [*team.engines, *find(models)])
            self._team = team
        one = _MicroBatch(self._updates, self._watch, place)
        work = Work(function, one.backward, team.parameters, scale=one.scaled, held=one.held, begin=one.begin)
        try:
            outcome = run_in_parts(work, args, kwargs, self._fit)
        except BaseException as error:  # noqa: BLE001 - goes on, if it is not to be skipped
            return None, one.fail(error)
        record.parts, record.rows = outcome.parts, outcome.rows
        num_dropped = run.num_dropped
        closing = one.end()
        return outcome.returned if run.num_dropped == num_dropped else None, closing


class _MicroBatch:
    """One micro-batch's backward, of which only the last part is the engines'."""

    def __init__(self, updates: Updates, watch: GradientWatch, place: Place) -> None:
        self._updates, self._watch, self._run, self._place = updates, watch, updates.run, place
        self._begun: Begun | None = None
        self._has_changed = False  # whether gradients of it are accumulated

    def begin(self) -> None:
        """Gradients change from here on."""
        if not self._has_changed:
            self._watch.check(self._run.name, self._place.index)
            self._has_changed = True

    def scaled(self, loss: torch.Tensor | LossSum) -> torch.Tensor:
        """What the backward of a part begins at."""
        tensor, seed = self._run.weigh(loss, self._updates.scaler)
        return tensor if seed is None else tensor * seed

    def backward(self, loss: torch.Tensor | LossSum, weight: float, whole: torch.Tensor | LossSum) -> None:
        """The backward in which the engines synchronise, where it is their time."""
        tensor, seed = self._run.weigh(loss, self._updates.scaler)
        if weight != 1.0:
            seed = torch.full_like(tensor, weight) if seed is None else seed * weight
        self._begun = self._run.begin(self._place, whole)
        for engine in self._begun.order.armed:
            engine.arm(tensor)
        tensor.backward(seed)

    def held(self) -> ExitStack:
        """What is run after that has failed half-way."""
        stack = ExitStack()
        for engine in () if self._begun is None else self._begun.order.armed:
            stack.enter_context(engine.holding_armed())
        return stack

    def end(self) -> Closing | None:
        """All parts have run."""
        assert self._begun is not None, "the last part's backward was the engines'"
        return self._run.end(self._begun)

    def fail(self, error: BaseException) -> Closing | None:
        """A part failed, and not for lack of memory, or could not be cut."""
        run = self._run
        if self._begun is not None:
            return run.end(self._begun, error)
        if not isinstance(error, self._updates.settings.skip) or isinstance(error, GradSyncError) or is_lost(error):
            raise error
        return run.spoil(self._place, error) if self._has_changed else run.drop(self._place)
