"""What would spoil windows of `sync_every` unseen: wrong steps of optimizers, gradients of a loop that was left."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gradsync._errors import GradSyncError
from gradsync._frames import is_left_on_purpose
from gradsync._registry import OPEN
from gradsync._step_hook import unwatch_steps, watch_steps
from gradsync.functional._owned import owned

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import CodeType, FrameType

    from gradsync.functional._place import Place
    from gradsync.functional._run import Run
    from gradsync.functional._team import Team

_LEFT = "_gradsync_left"  # of a gradient that a window left behind: how often it had been written to then


def leave(run: Run, error: BaseException, frame: FrameType | None, loop: Sequence[CodeType]) -> None:
    """The loop is left. Gradients of half a window are its user's, to be dropped before the next begins.

    An exception drops them; `frame` is the one that the loop is in. What it is zipped with may have ended.
    """
    if not isinstance(error, GeneratorExit) or not is_left_on_purpose(frame, loop, "FOR_ITER"):
        run.discard()
        return
    if run.index and not run.is_plain:
        for parameter in run.fit().parameters:
            if parameter.grad is not None:
                setattr(parameter.grad, _LEFT, parameter.grad._version)
    run.abandon()


def insist_on_none_left(team: Team) -> None:
    """Raise where a window begins with what such a loop has left."""
    gradients = [parameter.grad for parameter in team.parameters if parameter.grad is not None]
    left = sum(vars(gradient).get(_LEFT) == gradient._version for gradient in gradients)
    if left:
        raise GradSyncError(
            f"A window must begin without gradients, but {left} parameters still have those of a loop over sync_every "
            "that was left in the middle of a window. Call optimizer.zero_grad() behind that loop to drop them."
        )


def insist_on_none_inside(team: Team) -> None:
    """Raise where a window begins with gradients that an engine keeps where no `zero_grad` reaches them."""
    inside = team.gradients_left()[1] if any(engine.holds_inside for engine in team.engines) else 0
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
        team, stepped = self._run.fit(), owned([optimizer])
        if team.ids.isdisjoint(map(id, stepped)):
            return
        if not self.place.last:
            raise GradSyncError(
                "An optimizer may step on the last micro-step of a window only, where the gradients are synchronised, "
                "but optimizer.step() came on one that is held. Write: if step.last: optimizer.step(); "
                "optimizer.zero_grad()."
            )
        others = [run.window.team.ids for run in OPEN if run.window is not None]  # of a loop that is zipped with this
        known = team.ids.union(*others)
        left = [one for one in stepped if one.grad is not None and id(one) not in known]
        if left and (team.num_ranks > 1 or self.is_normalised):
            raise GradSyncError(
                f"An optimizer must step parameters of the models of sync_every only, which are synchronised and "
                f"normalised together, but it steps {len(left)} others that have a gradient, of shape "
                f"{', '.join(str(list(one.shape)) for one in left[:3])}. Pass all models: sync_every([model, other], "
                "...). Put a parameter of no module into one: nn.ParameterList([parameter])."
            )
