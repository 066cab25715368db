"""`Body`: runs the user's function on a micro-batch, drops it by `skip`, and runs it again as a replay."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from gradsync._errors import GradSyncError
from gradsync.decorator.replay_of_forward import Replay
from gradsync.functional import Loop, LossSum, Run, Team, find_loss
from gradsync.ranks.lost import cannot_be_skipped
from gradsync.ranks.meet import meet, ranks_where

Call: TypeAlias = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]
"""The user's function, and the arguments of one call. A plain tuple, because a class costs time in each call."""


class Body:
    """Runs the function of one (function, instance, optimizers)."""

    def __init__(self, run: Run, skip: tuple[type[Exception], ...]) -> None:
        self._run = run
        self._skip = skip
        self._has_met_forward = False

    def __call__(self, call: Call, team: Team) -> tuple[Any, torch.Tensor | LossSum | None]:
        """Run the function; returns what it returned, and its loss. Both are None if the micro-batch is dropped."""
        function, args, kwargs = call
        if not self._skip:
            returned = function(*args, **kwargs)
            return returned, find_loss(returned)
        models = self._run.who.models if team.forward_communicates else ()
        ids = {id(module) for model in models for module in model.modules()}
        began: list[nn.Module] = []  # the first of these whose forward has begun

        def see(module: nn.Module, _: Any) -> None:
            if not began and id(module) in ids:
                began.append(module)
                self._meet_at_first_forward(team, runs=True)

        try:
            # torch's hook for all modules, because a body may call any of them.
            with register_module_forward_pre_hook(see) if ids else nullcontext():
                returned = function(*args, **kwargs)
                return returned, find_loss(returned)
        except self._skip as error:
            if cannot_be_skipped(error):
                raise
            if began:
                raise GradSyncError(
                    f"{self._run.name} can drop a micro-batch on a sharded engine only before its model is called, for "
                    f"the other ranks wait in the model's forward, but {type(error).__name__} came after that. "
                    "Check the data before the forward."
                ) from error
            if team.lockstep:
                self._meet_at_first_forward(team, runs=False)
            return None, None

    def remember(self, replay: Replay, call: Call, loop: Loop | None) -> None:
        """Keep this micro-batch, which succeeded, for a replay, and its arguments as long as the loop."""
        self._run.replay = replay
        if loop is not None:
            loop.kept[self._run] = call

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
        if self._has_met_forward:
            return
        self._has_met_forward = True
        said = meet(team.group, f"the first forward of {self._run.name}", {"runs": runs})
        cannot = ranks_where(not one["runs"] for one in said)
        if cannot:
            raise GradSyncError(
                f"The first micro-batch of {self._run.name} must be a good one on every rank where the engine's "
                "forward communicates, to be repeated in place of those that `skip` drops, but rank "
                f"{cannot} dropped it. Look for a good one before the loop begins."
            )
