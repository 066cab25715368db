"""`Body`: runs the user's function on a micro-batch, drops it by `skip`, and runs it again as a replay."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gradsync._errors import GradSyncError, is_misuse
from gradsync.decorator.first_forward import ForwardWatch, check_first
from gradsync.decorator.replay import Replay
from gradsync.functional import find_loss
from gradsync.ranks.lost import is_lost
from gradsync.ranks.meet import meet

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from gradsync.functional import Loop, LossSum, Run, Team


class Body:
    """Runs the function of one (function, instance, optimizers)."""

    def __init__(self, run: Run, skip: tuple[type[Exception], ...]) -> None:
        self._run = run
        self._skip = skip
        self._has_met_forward = False

    def __call__(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], team: Team
    ) -> tuple[Any, torch.Tensor | LossSum | None]:
        """Run the function; returns what it returned, and its loss. Both are None if the micro-batch is dropped."""
        if not self._skip:
            returned = function(*args, **kwargs)
            return returned, find_loss(returned)
        began = ForwardWatch(
            self._run.who.models if team.forward_communicates else (),
            lambda: self._meet_at_first_forward(team, runs=True),
        )
        try:
            with began:
                returned = function(*args, **kwargs)
                return returned, find_loss(returned)
        except self._skip as error:
            if is_misuse(error) or is_lost(error):
                raise  # misuse is never skipped
            if began:
                raise GradSyncError(
                    f"{self._run.name} can drop a micro-batch on a sharded engine only before its model is called, for "
                    f"the other ranks wait in the model's forward, but {type(error).__name__} came after that. "
                    "Check the data before the forward."
                ) from error
            if team.lockstep:
                self._meet_at_first_forward(team, runs=False)
            return None, None

    def remember(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], loop: Loop | None
    ) -> None:
        """Keep this micro-batch, which succeeded, for a replay."""
        self._run.replay = Replay(function, args, kwargs)
        if loop is not None:
            loop.kept[self._run] = args, kwargs

    def again(self) -> torch.Tensor | LossSum:
        """Run the last good micro-batch once more; returns its loss. Other ranks wait in its forward."""
        if not self._run.can_repeat:
            raise GradSyncError(
                f"A rank whose engine communicates in forward repeats its last call of {self._run.name} where it has "
                "no micro-batch to run, but it has had none yet. See to it that its first micro-batch is a good one."
            )
        return find_loss(self._run.replay())

    def _meet_at_first_forward(self, team: Team, *, runs: bool) -> None:
        """Before the first forward that communicates: hear whether every rank runs it, or has dropped it."""
        if not self._has_met_forward:
            self._has_met_forward = True
            said = meet(team.group, f"the first forward of {self._run.name}", {"runs": runs})
            check_first([one["runs"] for one in said], self._run.name)
