"""What would spoil windows of `sync_every` unseen: wrong steps of optimizers, gradients of a loop that was left."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gradsync._errors import GradSyncError
from gradsync._frames import is_left_on_purpose
from gradsync._registry import OPEN
from gradsync._step_hook import unwatch_steps, watch_steps
from gradsync.functional._gradients import values_here
from gradsync.functional._owned import owned

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from types import CodeType, FrameType

    from torch import nn

    from gradsync.functional._place import Place
    from gradsync.functional._run import Run
    from gradsync.functional._team import Team

_LEFT = "_gradsync_left"  # of a gradient that a window left behind, or an update used: its version then


def leave(run: Run, error: BaseException, frame: FrameType | None, loop: Sequence[CodeType]) -> None:
    """The loop is left. Gradients of half a window are its user's, to be dropped before the next begins.

    An exception drops them; `frame` is the one that the loop is in. What it is zipped with may have ended.
    """
    if not isinstance(error, GeneratorExit) or not is_left_on_purpose(frame, loop, "FOR_ITER"):
        run.discard()
        return
    if run.index and not run.is_plain:
        _mark(run.fitting_team().parameters)
    run.abandon()


def _mark(parameters: Iterable[nn.Parameter]) -> None:
    """Note that these gradients are to be cleared before the next window."""
    for parameter in parameters:
        if parameter.grad is not None:
            setattr(parameter.grad, _LEFT, parameter.grad._version)


def insist_on_none_left(team: Team) -> None:
    """Raise where a window begins with gradients of an update, or of a loop that was left."""
    gradients = [parameter.grad for parameter in team.parameters if parameter.grad is not None]
    left = [gradient for gradient in gradients if vars(gradient).get(_LEFT) == gradient._version]
    if any(values_here(gradient).any() for gradient in left):  # .data.zero_() makes no new version
        raise GradSyncError(
            f"A window must begin without gradients, but {len(left)} parameters still have those of an update, or of a "
            "loop over sync_every that was left in the middle of a window. Call optimizer.zero_grad() after each "
            "optimizer.step(), and behind such a loop."
        )


def insist_on_none_inside(team: Team) -> None:
    """Raise where a window begins with gradients that an engine keeps where no `zero_grad` reaches them."""
    inside = team.gradients_left()[1] if team.holds_inside else 0
    if inside:
        raise GradSyncError(
            f"A window must begin without gradients, but the engine holds those of {inside} parameters, of a loop that "
            "was left in the middle of a window, or of backwards of your own. zero_grad() does not reach them: call "
            "gradsync.sync_gradients(model), and optimizer.zero_grad() behind it to drop them."
        )


class StepWatch:
    """Makes wrong steps of optimizers errors: steps on a held micro-step, and of gradients that are not exact."""

    def __init__(self, run: Run) -> None:
        self.place: Place | None = None  # of the current turn
        self.is_normalised = False  # whether the gradients of the models have been multiplied by a factor
        self._run = run
        watch_steps(self)

    def remove(self) -> None:
        """Watch no longer."""
        unwatch_steps(self)

    def __call__(self, optimizer: Any) -> None:
        """An optimizer is about to step."""
        if self.place is None:
            return
        team, stepped = self._run.fitting_team(), owned([optimizer])
        if team.ids.isdisjoint(map(id, stepped)):
            return
        if not self.place.last:
            raise GradSyncError(
                "An optimizer may step on the last micro-step of a window only, where the gradients are synchronised, "
                "but optimizer.step() came on one that is held. Write: if step.last: optimizer.step(); "
                "optimizer.zero_grad()."
            )
        left = [one for one in stepped if id(one) not in team.ids and one.grad is not None]
        if left and (team.num_ranks > 1 or self.is_normalised):
            self._insist_on_models(left)
        if not self._run.is_plain:
            _mark(stepped)

    def _insist_on_models(self, left: Sequence[nn.Parameter]) -> None:
        """Raise unless these parameters are those of a loop that is zipped with this one."""
        others = [run.window.team.ids for run in OPEN if run.window is not None]
        left = [one for one in left if not any(id(one) in ids for ids in others)]
        if left:
            raise GradSyncError(
                f"An optimizer must step parameters of the models of sync_every only, which are synchronised and "
                f"normalised together, but it steps {len(left)} others that have a gradient, of shape "
                f"{', '.join(str(list(one.shape)) for one in left[:3])}. Pass all models: sync_every([model, other], "
                "...). Put a parameter of no module into one: nn.ParameterList([parameter])."
            )
