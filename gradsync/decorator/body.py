"""`Body`: runs the user's function on a micro-batch, drops it by `skip`, and runs it again as a replay."""

from __future__ import annotations

import weakref
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch.nn.modules.module import register_module_forward_pre_hook

from gradsync._errors import GradSyncError, is_misuse
from gradsync.functional import find_loss
from gradsync.ranks.lost import is_lost
from gradsync.ranks.meet import meet, ranks_where

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

    from gradsync.functional import Loop, LossSum, Run, Team

Call: TypeAlias = "tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]"
"""The user's function, and the arguments of one call. A plain tuple, because a class costs time in each call."""

_DATA = (torch.Tensor, str, bytes, int, float, complex, bool, type(None), torch.device, torch.dtype)


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


class Replay:
    """The last call of a step function, to be repeated when other ranks wait in its forward.

    It is made before the function runs, which may take items out of a batch. Data is kept; everything else is
    referenced weakly: it keeps no model, no optimizer and no trainer alive.
    """

    __slots__ = ("_args", "_function", "_instance", "_kwargs")

    def __init__(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        instance = getattr(function, "__self__", None)
        self._function: Any = function if instance is None else getattr(function, "__func__", function)
        self._instance = None if instance is None else _kept(instance)
        self._args = _kept(args)
        self._kwargs = _kept(kwargs)

    @property
    def is_alive(self) -> bool:
        """Whether all its arguments are still there."""
        try:
            self._restored()
        except ReferenceError:
            return False
        return True

    def __call__(self) -> Any:
        """Make the call once more."""
        args, kwargs = self._restored()
        return self._function(*args, **kwargs)

    def _restored(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        first = () if self._instance is None else (_restored(self._instance),)
        return (*first, *_restored(self._args)), _restored(self._kwargs)


class _Remembered(weakref.ref[Any]):
    """A reference of ours: the user's data may hold others."""

    __slots__ = ()


def _kept(one: Any) -> Any:
    if isinstance(one, _DATA):
        return one.detach() if type(one) is torch.Tensor and one.grad_fn is not None else one
    if type(one) in {tuple, list, set}:
        return type(one)(map(_kept, one))
    if type(one) is dict:
        return {key: _kept(value) for key, value in one.items()}
    try:
        return _Remembered(one)
    except TypeError:
        return one  # it cannot be referenced weakly, like a named tuple: the user's data


def _restored(one: Any) -> Any:
    if isinstance(one, _Remembered):
        found = one()
        if found is None:
            raise ReferenceError("an argument of the last call is gone")
        return found
    if type(one) in {tuple, list, set}:
        return type(one)(map(_restored, one))
    if type(one) is dict:
        return {key: _restored(value) for key, value in one.items()}
    return one
