"""`MicroStep`: a place in a window, handed out to the body of a loop, and what happens in that turn."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from types import CodeType, TracebackType
from typing import Any

import torch

from gradsync._errors import GradSyncError
from gradsync._frames import drawn_by
from gradsync._loss import LossSum
from gradsync.functional._iterator.turn_watch import TurnWatch, mixed
from gradsync.functional._team.backward import RunBackward
from gradsync.functional._update.gradients import normalise
from gradsync.functional._update.profiler_ranges import NO_RANGE
from gradsync.functional._window.closing import Closing
from gradsync.functional._window.driver import Run
from gradsync.functional._window.window import Place, Role
from gradsync.ranks.lost import waited


class MicroStep:
    """The place of a micro-batch in its window, and its backward."""

    # Not a frozen dataclass: to make one costs four times as much, and each micro-step has its own.
    __slots__ = ("_is_empty", "_place", "_turn")

    def __init__(self, place: Place, turn: Turn) -> None:
        self._place = place
        self._turn = turn
        self._is_empty = False

    @property
    def index(self) -> int:
        """How many micro-steps came before it in its window."""
        return self._place.index

    @property
    def window(self) -> int:
        """How many windows of the loop closed before it."""
        return self._place.window

    @property
    def size(self) -> int:
        """The planned number of micro-batches in its window; a tail ends sooner."""
        return self._place.size

    @property
    def last(self) -> bool:
        """Whether the window closes with this step."""
        return self._place.last

    @property
    def replay(self) -> bool:
        """Whether its item was handed out before: other ranks have more data, and need this rank to take part.

        Its gradients weigh nothing.
        """
        return self._place.role is not Role.RUNS

    def __repr__(self) -> str:
        names = "index", "window", "size", "last", "replay"
        return f"MicroStep({', '.join(f'{name}={getattr(self, name)!r}' for name in names)})"

    def backward(
        self, loss: torch.Tensor, *, count: float | torch.Tensor | None = None, run: RunBackward | None = None
    ) -> None:
        """Scale the loss and run its backward; on the last micro-step, synchronise and normalise the gradients.

        After the last one, each gradient is the mean over all micro-batches of all ranks in the window. With `count`,
        `loss` is a sum over `count` items, and the gradient is that of all sums over all counts. With AMP, pass
        `scaler.scale(loss)`. `run` runs the backward in place of `loss.backward`: `run=accelerator.backward`.
        """
        self._turn.backward(self, loss if count is None else LossSum(loss, count), run)

    @property
    def empty(self) -> bool:
        """Whether this step has closed a window with nothing to average: its counts add up to zero.

        There are no gradients then. `optimizer.step()` does nothing; do not call `scaler.step()`.
        """
        return self._is_empty


# How far a turn is. Plain strings, because each micro-step looks at them.
_FRESH = "no step.backward so far"
_BEGUN = "step.backward has begun; it failed, if the turn ends like this"
_DONE = "step.backward has ended well"
_MIXED = "a plain backward has come beside step.backward"


class Turn:
    """The turn of the current micro-step: holds, hooks, and how far it is."""

    def __init__(self, run: Run) -> None:
        self.loop: Sequence[CodeType] = ()  # what draws the micro-steps
        self._run = run
        self._place: Place | None = None  # of the current turn
        self._state = _FRESH
        self._over: Callable[[], bool] | None = None  # call it after a backward of the user's own that synchronises
        self._hold: AbstractContextManager[Any] = NO_RANGE
        self._watch = TurnWatch(run, self._join)

    def end(self) -> None:
        """Called after the loop. The models go with their user's last reference: steps may be kept for longer."""
        self._watch.end_loop()
        self._over, self._hold = None, NO_RANGE
        self._run.forget_team()

    def at(self, place: Place) -> Turn:
        """Context manager: inside, holds and hooks are in place for the `MicroStep` of a place."""
        self._place, self._state, self._over = place, _FRESH, None
        return self

    def __enter__(self) -> MicroStep:
        place = self._place
        assert place is not None, "`at` comes first"
        if not place.index:
            self.loop = drawn_by(sys._getframe(2))  # frame 2 is that of whoever draws from the generator
        self._watch.begin(place)
        self._hold = self._run.holding(place)
        self._hold.__enter__()
        return MicroStep(place, self)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        try:
            self._watch.end()
            if self._over is not None and self._over():
                # The user's backward raised torch's error; an iterator cannot replace it, but can warn beside it.
                warnings.warn(waited(self._run.what()), RuntimeWarning, stacklevel=3)
        finally:
            self._hold.__exit__(kind, error, where)
        place, self._place = self._place, None
        if self._state is _BEGUN or self._state is _MIXED:  # also where the body has caught the error:
            self._run.discard()  # what had arrived must not count in a mean
        if kind is not None or place is None:
            return
        if self._state is _MIXED:
            raise mixed(place)
        if place.last:
            self._end_window(place)
        elif self._state is _FRESH and self._over is None:
            self._run.pass_by()

    def _end_window(self, place: Place) -> None:
        """Called after the last turn of a window, if that ended without an exception."""
        if self._state is _BEGUN:
            raise GradSyncError(
                f"The last micro-step of a window synchronises it, but the backward of that of window {place.window} "
                "failed, and the loop's body caught the exception. This rank has discarded the window, and the others "
                "may have closed it. Let that exception leave the loop, and begin another loop on all ranks."
            )
        if self._watch.closing is None:
            self._run.insist_on_same(place)
            raise GradSyncError(
                f"The last micro-step of a window must run a backward, which synchronises the window, but that of "
                f"window {place.window} ended without one. Call step.backward(loss) in each turn, or end the loop."
            )
        self._run.close()

    def backward(self, step: MicroStep, loss: torch.Tensor | LossSum, runs: RunBackward | None) -> None:
        """What `MicroStep.backward` does."""
        place = self._begin(step)
        self._close(step, self._run.backward(place, loss, run=runs))

    def in_parts(self, step: MicroStep, run: Callable[[Run, Place], tuple[Any, Closing | None]]) -> Any:
        """What `Fitting.__call__` does: `run` runs forward and backward in a place; returns what the forward did."""
        place = self._begin(step)
        returned, closing = run(self._run, place)
        self._close(step, closing)
        return returned

    def _begin(self, step: MicroStep) -> Place:
        """Check that this is the first backward of the current step; returns its place."""
        place = self._place
        if step._place is not place or place is None or self._state is not _FRESH or self._over is not None:
            again = step._place is place
            raise GradSyncError(
                f"Each micro-step runs one backward, in its own turn of the loop, but micro-step {step.index} of "
                f"window {step.window} ran "
                + ("a second one. Add the losses up and call step.backward once." if again else
                   "one out of turn. Call its backward before the loop draws the next item, or is left.")
            )  # fmt: skip
        self._watch.before_backward(place)
        self._state = _BEGUN
        return place

    def _close(self, step: MicroStep, closing: Closing | None) -> None:
        """After the backward; `closing` is None in a held place."""
        self._state = _DONE
        self._watch.after_backward(step._place, closing)
        if closing is None:
            return
        team = self._run.fitting_team()
        step._is_empty = closing.factor is None
        if closing.factor is None:
            team.drop_gradients()
        else:
            normalise(team.parameters, closing.factor)

    def _join(self) -> None:
        """Called when the user's own backward comes to a parameter."""
        place = self._place
        assert place is not None, "the hooks that call this live as long as a step's turn"
        if self._watch.is_explicit:
            self._state = _MIXED
            raise mixed(place)
        self._run.note_plain(place)
        if not self._run.synchronises(place):
            return
        if self._over is None:
            if not self._run.fitting_team().holds_inside:  # their parameters are gathered now
                self._run.insist_on_same(place)
            self._over = self._run.join(place, self._watch.reached, self._watch.note)
        elif self._watch.closing is not None and place.last:
            raise GradSyncError(
                "The last micro-step of a window runs one backward, which synchronises the window, but a second one "
                f"came in the last micro-step of window {place.window}. Its gradients would stay on this rank. Add the "
                "losses up, and run backward once."
            )
