"""A micro-batch of any `Run` in as many parts as memory needs. The engines take part in the last one's backward."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch

from gradsync._errors import GradSyncError
from gradsync.engines import find
from gradsync.functional._loss import LossSum
from gradsync.parts import Fit, Outcome, Work, is_out_of_memory, run_in_parts

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch.amp import GradScaler

    from gradsync.functional._boundary import Begun
    from gradsync.functional._place import Place
    from gradsync.functional._run import Run
    from gradsync.functional._share import Closing
    from gradsync.functional._team import Team
    from gradsync.parts import Cut


class Fitted:
    """What is remembered between the micro-batches of one function, and how the last of them ran."""

    def __init__(self, cut: bool | Cut, name: str) -> None:  # noqa: FBT001 - its user's
        self.parts = 1
        self.rows: int | None = None
        self._fit = Fit(cut, name=name)
        self._team: Team | None = None  # which is known to allow it

    def run(
        self, one: OneBackward, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        """Run `function` and its backward; returns what it returned. The last backward has then not ended yet."""
        run, team = one.run, one.run.fit()
        if one.place.index == 0 or team is not self._team:
            models = run.who.models
            self._fit.open(models, () if team is self._team else [*team.engines, *find(models)])
            self._team = team
        work = Work(function, one.weigh, one.backward, team.parameters, held=one.held, begin=one.begin)
        return self._returned(run_in_parts(work, args, kwargs, self._fit))

    def run_forward(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run `function` alone, in parts of the same size: a replay, whose gradients would weigh nothing."""
        work = Work(function, lambda loss, _: (_tensor(loss), None), lambda *_: None, ())
        return self._returned(run_in_parts(work, args, kwargs, self._fit))

    def _returned(self, outcome: Outcome) -> Any:
        self.parts, self.rows = outcome.parts, outcome.rows
        return outcome.returned


class OneBackward:
    """One micro-batch's backward, of which only the last part is the engines'."""

    def __init__(
        self,
        run: Run,
        place: Place,
        *,
        scaler: GradScaler | None = None,
        changes: Callable[[], object] = lambda: None,
    ) -> None:
        """`changes` is called right before the first gradient of it is accumulated."""
        self.run, self.place = run, place
        self.begun: Begun | None = None  # once the last part's backward has
        self.has_changed = False  # whether gradients of it are accumulated
        self._scaler, self._changes = scaler, changes

    def begin(self) -> None:
        """Gradients change from here on."""
        if not self.has_changed:
            self._changes()
            self.has_changed = True

    def weigh(self, loss: torch.Tensor | LossSum, weight: float) -> tuple[torch.Tensor, torch.Tensor | None]:
        """What the backward of a part runs from, and what gradient it begins with (None: 1)."""
        tensor, seed = self.run.weigh(loss, self._scaler)
        if weight != 1.0:
            seed = torch.full_like(tensor, weight) if seed is None else seed * weight
        return tensor, seed

    def backward(self, tensor: torch.Tensor, seed: torch.Tensor | None, whole: torch.Tensor | LossSum) -> None:
        """The backward in which the engines synchronise, where it is their time."""
        try:
            self.begun = self.run.begin(self.place, whole)
        except Exception as error:
            if is_out_of_memory(error):  # the ranks must not begin twice
                raise GradSyncError(
                    "The ranks exchange a small table, and buffers where there are any, before a window's gradients "
                    "synchronise, but there was no memory left for these. Leave more room: fewer rows a call."
                ) from error
            raise
        for engine in self.begun.order.armed:
            engine.arm(tensor)
        tensor.backward(seed)

    def held(self) -> ExitStack:
        """What is run after that has failed half-way."""
        stack = ExitStack()
        for engine in () if self.begun is None else self.begun.order.armed:
            stack.enter_context(engine.holding_armed())
        return stack

    def end(self, error: BaseException | None = None) -> Closing | None:
        """All parts have run, or the last one's backward has failed in `error`."""
        if self.begun is None:
            assert error is not None, "the last part's backward was the engines'"
            raise error
        return self.run.end(self.begun, error)


def _tensor(loss: torch.Tensor | LossSum) -> torch.Tensor:
    return loss.loss if isinstance(loss, LossSum) else loss
