"""`BodyWatch`: watches the body of a loop over `sync_every`: what is held in each turn, and what the user does.

A turn is one run of the loop's body.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from types import CodeType, FrameType, TracebackType
from typing import Any

import torch

from gradsync._errors import GradSyncError
from gradsync._frames import drawn_by, is_left_on_purpose
from gradsync._loss import PLAIN
from gradsync._marks import KEPT, LEFT, mark
from gradsync._step_hook import watch_steps
from gradsync.functional._iterator.plain_backward import Arrivals, InUsersBackward, PlainBackward
from gradsync.functional._iterator.users_steps_and_gradients import (
    check_step,
    insist_on_none_inside,
    insist_on_none_left,
)
from gradsync.functional._team.team import Team
from gradsync.functional._update.contexts import NO_RANGE
from gradsync.functional._update.gradients import normalise
from gradsync.functional._update.optimizers import owned
from gradsync.functional._window.closing import Closing
from gradsync.functional._window.gradient_watch import GradientWatch
from gradsync.functional._window.place import RUNS, Place
from gradsync.functional._window.run import Run
from gradsync.ranks.lost import waited

# How far a turn is. Plain strings, because each micro-step looks at them.
_FRESH = "no step.backward so far"
_QUIET = (
    "no step.backward so far; a plain backward is known, or PlainBackward tells of it, and arrivals say nothing new"
)
_BEGUN = "step.backward has begun; it failed, if the turn ends like this"
_DONE = "step.backward has ended well"
_MIXED = "a plain backward has come beside step.backward"

_BEFORE = frozenset({_FRESH, _QUIET})
_BROKEN = frozenset({_BEGUN, _MIXED})  # if a turn ends like this
_LISTENING = frozenset({_FRESH, _DONE, _MIXED})


class BodyWatch:
    """One turn of the loop after another. It sees plain backwards, changed gradients, and wrong steps.

    Most of that is an error once the user has called `step.backward`.
    """

    def __init__(self, run: Run) -> None:
        self._loop: Sequence[CodeType] = ()  # what draws the micro-steps
        self._run = run
        self._is_explicit = False  # whether the user has called step.backward, in any turn
        self._arrivals: Arrivals | None = None  # hooks at the parameters of the current team
        self._gradients = GradientWatch()
        self._older: Sequence[torch.Tensor] = ()  # for each gradient that a window began with: whether it was not zero
        # Of the current turn:
        self._place: Place | None = None
        self._hold: AbstractContextManager[Any] = NO_RANGE
        self._state = _FRESH
        self._closing: Closing | None = None  # of the window, once it has synchronised
        self._plain: PlainBackward | None = None  # hooks for a plain backward that is to synchronise
        self._over: Callable[[], bool] | None = None  # call it after a plain backward that synchronises
        watch_steps(self)

    def end_loop(self) -> None:
        """Called after the last turn: let go of the models, because the user may keep steps for longer."""
        if self._arrivals is not None:
            self._arrivals.stop()
        self._arrivals, self._gradients = None, GradientWatch()
        self._place, self._over, self._hold = None, None, NO_RANGE
        if self._run.team is not None:
            mark(self._run.team.parameters, KEPT)
        self._run.team = None

    def leave(self, error: BaseException, frame: FrameType | None) -> None:
        """The loop is left. After an exception, the open window is discarded.

        After a break its gradients stay, and its user clears them before the next window begins. `frame` is the one
        that the loop is in.
        """
        run, is_end = self._run, isinstance(error, GeneratorExit)
        if self._state in _BROKEN or not is_end or not is_left_on_purpose(frame, self._loop):
            run.discard()
            return
        if run.index and run.open_window.kind != PLAIN:
            mark(run.fitting_team().parameters, LEFT)
        run.abandon()

    # -- a turn -----------------------------------------------------------------------------------------------------

    def at(self, place: Place) -> BodyWatch:
        """A turn begins. Context manager around its body, in which gradients are held back."""
        run = self._run
        self._place, self._state, self._closing, self._over = place, _FRESH, None, None
        self._hold = run.holding(place)
        if not place.index:
            self._loop = drawn_by(sys._getframe(2))  # frame 2 is that of whoever draws from the generator
            self._begin_window(run.fitting_team())
        if not self._is_explicit:
            window = run.open_window
            if place.last or any(engine.owes_first for engine in window.active):
                leaves, swapped = window.team.leaves, window.team.swapped
                self._plain, self._state = PlainBackward(leaves, self._join, swapped), _QUIET
        return self

    def __enter__(self) -> None:
        self._hold.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        place, self._place = self._place, None
        try:
            self._stop_plain()
            if self._over is not None and self._over():
                # The user's backward raised torch's error; an iterator cannot replace it, but can warn beside it.
                warnings.warn(waited(self._run.open_window.what()), RuntimeWarning, stacklevel=3)
        finally:
            self._hold.__exit__(kind, error, where)
        if kind is None and place is not None:
            self._end(place)

    def _end(self, place: Place) -> None:
        """The turn has ended, and its body has let no exception out."""
        state, self._state = self._state, _QUIET
        if state in _BROKEN:
            self._run.discard()  # what had arrived must not count in a mean
        if state is _MIXED:
            raise _mixed(place)
        if place.last:
            self._end_window(place, state)
        elif self._over is None and state in _BEFORE:
            window = self._run.open_window
            window.num_own, window.index = window.num_own + 1, window.index + 1

    def _begin_window(self, team: Team) -> None:
        insist_on_none_inside(team)
        if team is not self._gradients.team:
            self._gradients.watch(team)
            if self._arrivals is not None:
                self._arrivals.stop()
            self._arrivals = Arrivals(_hooked(team), self._arrive)
        self._gradients.remember()

    def _end_window(self, place: Place, state: str) -> None:
        """Called after the last turn of a window, if that ended without an exception."""
        if state is _BEGUN:
            raise GradSyncError(
                f"The last micro-step of a window synchronises it, but in window {place.window} its backward failed, "
                "and the loop's body caught the exception. This rank has discarded the window, and the others "
                "may have closed it. Let that exception leave the loop, and begin another loop on all ranks."
            )
        if self._closing is None:
            self._run.insist_on_same(place)
            raise GradSyncError(
                "The last micro-step of a window must run a backward, which synchronises the window, but the last one "
                f"of window {place.window} ended without one. Call step.backward(loss) in each turn, or end the loop."
            )
        self._run.close()

    # -- step.backward ----------------------------------------------------------------------------------------------

    def begin(self, place: Place) -> Run:
        """The backward of a micro-step begins: check that it may; returns what runs it."""
        run = self._run
        if place is not self._place or self._state not in _BEFORE or self._over is not None:
            raise GradSyncError(
                f"Each micro-step runs one backward, in its own turn of the loop, but micro-step {place.index} of "
                f"window {place.window} ran "
                + ("a second one. Add the losses up and call step.backward once." if place is self._place else
                   "one out of turn. Call its backward before the loop draws the next item, or is left.")
            )  # fmt: skip
        if not self._is_explicit and run.open_window.kind == PLAIN:
            raise _mixed(place)
        self._is_explicit = True
        self._stop_plain()
        if not place.index:
            self._older = insist_on_none_left(run.fitting_team(), place.window)
            if self._gradients.appeared():
                raise _mixed(place)
        elif (change := self._gradients.change()) is not None:
            raise GradSyncError(
                "Gradients must be left alone until step.backward on the last micro-step of a window has run, but "
                f"before step.backward of micro-step {place.index} of window {place.window} they {change}. Run one "
                "backward in each micro-step, through step.backward; clip, unscale and clear gradients where "
                "step.last is true."
            )
        self._state = _BEGUN
        return run

    def end_backward(self, closing: Closing | None) -> None:
        """That backward has ended; `closing` is None in a held place."""
        self._state = _DONE
        if closing is None:
            self._gradients.remember()
            return
        if closing.factor != 1.0 and any(self._older):
            raise GradSyncError(
                "A short window, or one with counts, multiplies all gradients at its end, so that it must begin "
                f"without gradients, but window {self._run.number} began with those of "
                f"{sum(map(bool, self._older))} parameters, of an earlier window or of backwards of your own. Clear "
                "them before. Models that are not stepped after each window need a sync_every of their own."
            )
        self._closing = closing
        if closing.factor is not None:
            normalise(self._run.fitting_team().parameters, closing.factor)

    # -- what else the user does ------------------------------------------------------------------------------------

    def _arrive(self, _: torch.Tensor) -> None:
        """A gradient has arrived at a parameter."""
        if self._state in _LISTENING and self._place is not None:
            self._join()

    def _join(self) -> None:
        """A plain backward has come to a parameter. Where the window synchronises, that begins in it."""
        place, run = self._place, self._run
        assert place is not None, "the hooks that call this live as long as a step's turn"
        if self._is_explicit:
            self._state = _MIXED
            raise _mixed(place)
        self._state = _QUIET
        window, is_own = run.open_window, place.role is RUNS
        if is_own:
            window.kind = PLAIN
        if self._plain is None:
            return
        if self._over is None:
            if not window.team.holds_inside:  # such engines have their parameters gathered now
                run.insist_on_same(place)
            if is_own:
                window.add_plain()
            self._over = InUsersBackward(run.passage(place), self._plain.reached, self._note).over
        elif self._closing is not None and place.last:
            raise GradSyncError(
                "The last micro-step of a window runs one backward, which synchronises the window, but a second one "
                f"came in the last micro-step of window {place.window}. Its gradients would stay on this rank. Add the "
                "losses up, and run backward once."
            )

    def _note(self, closing: Closing | None) -> None:
        self._closing = closing

    def _stop_plain(self) -> None:
        if self._plain is not None:
            self._plain.stop()
            self._plain = None

    def before_step(self, optimizer: Any) -> None:
        """Called before any optimizer steps."""
        if self._place is not None:
            reached = () if self._plain is None else self._plain.reached
            check_step(self._run, self._place, self._closing, owned([optimizer]), reached)


def _hooked(team: Team) -> Iterable[torch.Tensor]:
    """The tensors at which a team's gradients arrive.

    With FSDP2 these are also the parameters themselves, because a loss may use them without a forward.
    A hook at an offloaded parameter would make FSDP2 wait for each copy to the host.
    """
    leaves = team.leaves
    devices = {leaf.device.type for leaf in leaves}
    return dict.fromkeys((*leaves, *(one for one in team.watchable if one.device.type in devices)))


def _mixed(place: Place) -> GradSyncError:
    """The error where `step.backward` and other backwards came in the same window."""
    return GradSyncError(
        f"Use step.backward once in each micro-step, or a plain backward everywhere, but in micro-step {place.index} "
        f"of window {place.window} a plain backward of the same model came beside it, or the backward of another loop. "
        "It is not scaled and, on the last micro-step, not synchronised. Add the losses up, call step.backward once, "
        "and freeze a model that another one's loss only passes through. torch.autograd.grad is allowed."
    )
