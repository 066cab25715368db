"""The user's function: run on a micro-batch, dropped by `skip`, run again as a replay; gradients that it touches."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from contextlib import nullcontext
from enum import Enum
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from gradsync._errors import GradSyncError
from gradsync.decorator.participants import Call, attributes_of, has_step
from gradsync.functional import GradientWatch, LossSum, Run, Team, find_loss
from gradsync.ranks.meet import meet, ranks_where

_DATA = (torch.Tensor, str, bytes, int, float, complex, bool, type(None), torch.device, torch.dtype)
_LEAVES = (*_DATA, type, Enum, weakref.ref)
_CONTAINERS = (list, tuple, set, frozenset, deque)
_LARGE = 1000  # what holds more objects is not looked through


class SkippableBody(GradientWatch):
    """Runs the function of one (function, instance, optimizers), which must leave gradients alone.

    Code between two calls must leave them alone, too, and a window must begin without any.
    """

    __slots__ = ("_has_met_forward", "_run")

    def __init__(self, run: Run) -> None:
        super().__init__()
        self._run = run
        self._has_met_forward = False

    def begin(self, team: Team) -> None:
        """Called when a window opens. The first window of a team must find no gradients."""
        if team is self.team:
            return
        self.watch(team)
        name, (left, inside) = self._run.name, team.gradients_left()
        if left or inside:
            drop = "gradsync.sync_gradients(model) and " if inside else ""
            raise GradSyncError(
                f"A window must begin without gradients, but {left or inside} parameters have one as {name} "
                f"begins its first. Call {drop}optimizer.zero_grad() after your own backwards. If they are of a "
                f"window that another {name}, or another function, left open, call its flush() or reset() before it "
                "goes."
            )

    def check(self) -> None:
        """Raise if the gradients are not as they were left."""
        change = self.change()
        if change is not None:
            raise GradSyncError(
                f"{self._run.name} runs backward, step and zero_grad itself, but since its last micro-batch the "
                f"gradients {change}, in its body or between two calls. Return the unscaled loss and leave the rest to "
                "the decorator: accumulating(..., clip_norm=1.0) clips."
            )

    def __call__(self, call: Call, team: Team) -> tuple[Any, torch.Tensor | LossSum | None]:
        """Run the function; returns what it returned, and its loss. Both are None if the micro-batch is dropped."""
        function, args, kwargs = call
        if not self._run.terms.skip:  # the same, quickly
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
        except Exception as error:
            if not self._run.terms.skips(error):
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

    def again(self) -> torch.Tensor | LossSum:
        """Run the last good micro-batch once more; returns its loss. Other ranks wait in its forward."""
        if not self._run.can_repeat:
            lack = "it has had none yet. See to it that its first micro-batch is a good one"
            if self._run.replay is not None:
                lack = "an object that this call was given is gone. Keep it until the next call"
            raise GradSyncError(
                f"A rank whose engine communicates in forward repeats its last call of {self._run.name} where it has "
                f"no micro-batch to run, but {lack}."
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

    It is made before the function runs, which may take items out of a batch. Tensors are kept; everything else is
    referenced weakly: it keeps no model, no optimizer and no trainer alive.
    """

    __slots__ = ("_arguments", "_data", "_function", "_remembered")

    def __init__(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if isinstance(function, MethodType):
            args, function = (function.__self__, *args), function.__func__
        self._function = function
        self._remembered: list[_Remembered] = []
        self._arguments = _changed((args, kwargs), self._kept)
        self._data: list[Any] = []  # keeps what is remembered alive

    @property
    def is_alive(self) -> bool:
        """Whether all its arguments are still there."""
        return all(one() is not None for one in self._remembered)

    def keep_data(self) -> None:
        """Keep the user's objects that hold nothing but data: the call may be repeated behind its loop."""
        self._data = [one for ref in self._remembered if _is_data(one := ref())]

    def __call__(self) -> Any:
        """Make the call once more."""
        args, kwargs = _changed(self._arguments, lambda one: one() if isinstance(one, _Remembered) else one)
        return self._function(*args, **kwargs)

    def _kept(self, one: Any) -> Any:
        if isinstance(one, _DATA):
            return one.detach() if type(one) is torch.Tensor and one.grad_fn is not None else one
        try:
            self._remembered.append(_Remembered(one))
        except TypeError:
            return one  # it cannot be referenced weakly, like a named tuple: the user's data
        return self._remembered[-1]


class _Remembered(weakref.ref[Any]):
    """A reference of ours: the user's data may hold others."""

    __slots__ = ()


def _is_data(one: Any) -> bool:
    """Whether an object holds data, and no module, optimizer or function, which it would keep alive."""
    todo, seen = [one], set()
    for inner in todo:
        if isinstance(inner, _LEAVES) or id(inner) in seen:
            continue
        seen.add(id(inner))
        if callable(inner) or has_step(inner) or isinstance(inner, BaseException) or len(seen) > _LARGE:
            return False
        items = dict.values(inner) if isinstance(inner, dict) else inner if isinstance(inner, _CONTAINERS) else ()
        if type(inner).__module__ == "builtins" and not isinstance(inner, (dict, *_CONTAINERS)):
            return False  # a generator, a view of a dict: what it holds cannot be seen
        todo += (*items, *attributes_of(inner))
    return True


def _changed(one: Any, change: Callable[[Any], Any]) -> Any:
    """What `change` makes of it, or of the items of containers."""
    if type(one) in {tuple, list, set}:
        return type(one)(_changed(item, change) for item in one)
    if type(one) is dict:
        return {key: _changed(value, change) for key, value in one.items()}
    return change(one)
