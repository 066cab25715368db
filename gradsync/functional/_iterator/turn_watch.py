"""`TurnWatch`: in a turn of `sync_every`, sees backwards beside `step.backward`, changed gradients, wrong steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from types import CodeType, FrameType
from typing import Any

import torch
from torch import nn

from gradsync._errors import GradSyncError
from gradsync._frames import is_left_on_purpose
from gradsync._state import OPEN
from gradsync._step_hook import watch_steps
from gradsync.functional._team.hooks import Arrivals, PlainBackward
from gradsync.functional._team.team import Team
from gradsync.functional._update.gradients import values_here
from gradsync.functional._update.optimizers import owned
from gradsync.functional._window.closing import Closing
from gradsync.functional._window.driver import Run
from gradsync.functional._window.gradient_watch import GradientWatch
from gradsync.functional._window.window import Place

_LEFT = "_gradsync_left"  # of a gradient that a window left behind, or an update used: its version then


def leave(run: Run, error: BaseException, frame: FrameType | None, loop: Sequence[CodeType]) -> None:
    """The loop is left. Gradients of half a window are its user's, to be dropped before the next begins.

    An exception drops them; `frame` is the one that the loop is in. Where what it is zipped with has ended (FOR_ITER),
    it is left on purpose.
    """
    if not isinstance(error, GeneratorExit) or not is_left_on_purpose(frame, loop, "FOR_ITER"):
        run.discard()
        return
    if run.index and not run.is_plain:
        mark(run.fitting_team().parameters)
    run.abandon()


def mark(parameters: Iterable[nn.Parameter]) -> None:
    """Note that these gradients are to be cleared before the next window."""
    for parameter in parameters:
        if parameter.grad is not None:
            setattr(parameter.grad, _LEFT, parameter.grad._version)


def insist_on_none_left(team: Team) -> list[torch.Tensor]:
    """Raise where a window begins with gradients of an update, or of a loop that was left.

    Returns of each other gradient whether it has a value that is not zero.
    """
    gradients = [parameter.grad for parameter in team.parameters if parameter.grad is not None]
    there = [values_here(gradient).any() for gradient in gradients]
    left = [one for gradient, one in zip(gradients, there, strict=True) if _is_marked(gradient)]
    if any(left):  # their values count, because .data.zero_() makes no new version
        raise GradSyncError(
            f"A window must begin without gradients, but {len(left)} parameters still have those of an update, or of a "
            "loop over sync_every that was left in the middle of a window. Call optimizer.zero_grad() after each "
            "optimizer.step(), and behind such a loop."
        )
    return there


def _is_marked(gradient: torch.Tensor) -> bool:
    return bool(vars(gradient).get(_LEFT) == gradient._version)


def insist_on_none_inside(team: Team) -> None:
    """Raise where a window begins with gradients that an engine keeps where no `zero_grad` reaches them."""
    inside = team.num_inside() if team.holds_inside else 0
    if inside:
        raise GradSyncError(
            f"A window must begin without gradients, but the engine holds those of {inside} parameters, of a loop that "
            "was left in the middle of a window, or of backwards of your own. zero_grad() does not reach them: call "
            "gradsync.sync_gradients(model), and optimizer.zero_grad() behind it to drop them."
        )


class TurnWatch:
    """What a turn is watched for. Most of it is an error once the user has called `step.backward`."""

    def __init__(self, run: Run, came: Callable[[], object]) -> None:
        """`came` is called at each parameter that a backward of the user's own reaches."""
        self.is_explicit = False  # whether the user has called step.backward
        self._run = run
        self._came = came
        self._arrivals: Arrivals | None = None  # hooks at the parameters of the current team
        self._plain: PlainBackward | None = None  # hooks for a plain backward that is to synchronise
        self._listens = False  # whether a gradient that arrives now says something new
        self._gradients = GradientWatch()
        self._older: Sequence[torch.Tensor] = ()  # for each gradient that a window began with: whether it was not zero
        self._place: Place | None = None  # of the current turn
        self.closing: Closing | None = None  # of the window, once it has synchronised
        watch_steps(self)

    def begin(self, place: Place) -> None:
        """A turn begins."""
        self._place, self.closing = place, None
        if not place.index:
            self._begin_window()
        if not self.is_explicit and self._run.synchronises(place):
            team = self._run.fitting_team()
            self._plain = PlainBackward(team.leaves, self._came, team.swapped)
        self._listens = self._plain is None

    def end(self) -> None:
        """A turn ends."""
        self._place, self._listens = None, False
        if self._plain is not None:
            self._stop()

    def end_loop(self) -> None:
        """Called after the last turn. What refers to the models goes now, and waits for no garbage collection."""
        if self._arrivals is not None:
            self._arrivals.stop()
        self._came, self._arrivals, self._gradients = bool, None, GradientWatch()

    def _begin_window(self) -> None:
        team = self._run.fitting_team()
        insist_on_none_inside(team)
        if team is not self._gradients.team:
            self._gradients.watch(team)
            if self._arrivals is not None:
                self._arrivals.stop()
            self._arrivals = Arrivals(_hooked(team), self._arrive)
        self._gradients.remember()

    def _arrive(self, _: torch.Tensor) -> None:
        """A gradient has arrived at a parameter."""
        if self._listens:
            self._listens = self.is_explicit  # a plain loop is noted once in each turn
            self._came()

    @property
    def reached(self) -> set[int]:
        """The ids of the leaves that the user's own backward has come to."""
        return set() if self._plain is None else self._plain.reached

    def before_backward(self, place: Place) -> None:
        """The user has called `step.backward`, for the first time in this turn."""
        if not self.is_explicit and self._run.is_plain:
            raise mixed(place)
        self.is_explicit, self._listens = True, False
        if self._plain is not None:
            self._stop()
        if not place.index:
            self._older = insist_on_none_left(self._run.fitting_team())
            if self._gradients.appeared():
                raise mixed(place)
            return
        change = self._gradients.change()
        if change is not None:
            raise GradSyncError(
                "Gradients must be left alone until step.backward on the last micro-step of a window has run, but "
                f"before that of micro-step {place.index} of window {place.window} they {change}. Run one backward in "
                "each micro-step, through step.backward; clip, unscale and clear gradients where step.last is true."
            )

    def note(self, closing: Closing | None) -> None:
        """The window has synchronised."""
        self.closing = closing

    def after_backward(self, place: Place, closing: Closing | None) -> None:
        """That backward has ended."""
        self._listens = True
        if closing is None:
            self._gradients.remember()
        elif closing.factor != 1.0 and any(self._older):
            raise GradSyncError(
                "A short window, or one with counts, multiplies all gradients at its end, so that it must begin "
                f"without gradients, but window {place.window} began with those of {sum(map(bool, self._older))} "
                "parameters, of an earlier window or of backwards of your own. Clear them before. Models that are not "
                "stepped after each window need a sync_every of their own."
            )
        self.closing = closing

    def before_step(self, optimizer: Any) -> None:
        """An optimizer is about to step: an error on a held micro-step, and with gradients that are not exact."""
        if self._place is None:
            return
        team, stepped = self._run.fitting_team(), owned([optimizer])
        if team.ids.isdisjoint(map(id, stepped)):
            return
        if self.closing is None:
            self._run.insist_on_same(self._place)  # what was unfrozen in the body has had no backward of the window's
            if self._place.last and self.reached:
                raise GradSyncError(
                    "A plain backward on the last micro-step of a window must tell when it ends, because the window "
                    f"synchronises there, but that of window {self._place.window} did not: torch passes over such "
                    "callbacks under compiled autograd. Call step.backward(loss) in each micro-step."
                )
            where = "before the backward of the last one" if self._place.last else "on one that is held"
            raise GradSyncError(
                "An optimizer may step on the last micro-step of a window only, behind its backward, where the "
                f"gradients are synchronised, but optimizer.step() came {where}. Write behind the backward: if "
                "step.last: optimizer.step(); optimizer.zero_grad()."
            )
        if not team.ids.issuperset(map(id, stepped)) and (team.num_ranks > 1 or self.closing.factor not in {None, 1.0}):
            _insist_on_models([one for one in stepped if id(one) not in team.ids and one.grad is not None])
        if not self._run.is_plain:
            mark(stepped)

    def _stop(self) -> None:
        assert self._plain is not None, "asked before, for most turns have none"
        self._plain.stop()
        self._plain = None


def _hooked(team: Team) -> Iterable[torch.Tensor]:
    """Where gradients of a team arrive: with FSDP2 also at parameters themselves, of a loss that no forward has led to.

    A hook at an offloaded parameter would make FSDP2 wait for each copy to the host.
    """
    leaves = team.leaves
    devices = {leaf.device.type for leaf in leaves}
    return dict.fromkeys((*leaves, *(one for one in team.watchable if one.device.type in devices)))


def mixed(place: Place) -> GradSyncError:
    """The error where `step.backward` and other backwards came in the same window."""
    return GradSyncError(
        f"Use step.backward once in each micro-step, or a plain backward everywhere, but in micro-step {place.index} "
        f"of window {place.window} a plain backward of the same model came beside it, or that of another loop. It is "
        "not scaled and, on the last micro-step, not synchronised. Add the losses up, and call step.backward once; "
        "freeze a model that another one's loss only passes through. torch.autograd.grad is allowed."
    )


def _insist_on_models(left: Sequence[nn.Parameter]) -> None:
    """Raise unless these parameters are those of a loop that is zipped with this one."""
    others = [run.team.ids for run in OPEN]
    left = [one for one in left if not any(id(one) in ids for ids in others)]
    if left:
        raise GradSyncError(
            f"An optimizer must step parameters of the models of sync_every only, which are synchronised and "
            f"normalised together, but it steps {len(left)} others that have a gradient, of shape "
            f"{', '.join(str(list(one.shape)) for one in left[:3])}. Pass all models: sync_every([model, other], "
            "...). Put a parameter of no module into one: nn.ParameterList([parameter])."
        )
