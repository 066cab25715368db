"""Watches that raise if the user's code changes gradients or steps the optimizer in the middle of a window."""

from __future__ import annotations

import weakref
from operator import attrgetter, is_not
from typing import TYPE_CHECKING, Protocol

from gradsync._errors import GradSyncError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from torch import nn
    from torch.optim import Optimizer

    from gradsync.functional import Team


_GRADIENT = attrgetter("grad")


class GradientWatch:
    """Watches the gradients that the optimizers step, to notice whether other code has changed them.

    A body may run backward on one layer alone, or clip it: each gradient is looked at, a fifth of a us for each call.
    """

    __slots__ = ("_left", "_team", "_watched")

    def __init__(self) -> None:
        self._team: Team | None = None
        self._watched: Sequence[nn.Parameter] = ()
        # Each gradient after the last micro-batch, with its version; None if nothing is accumulated.
        self._left: tuple[list[torch.Tensor | None], list[int]] | None = None

    def begin(self, name: str, team: Team) -> None:
        """Called when a window opens. The first window of a team must find no gradients."""
        if team is self._team:
            return
        self._watch(team)
        left, inside = team.gradients_left()
        if left or inside:
            drop = "gradsync.sync_gradients(model) and " if inside else ""
            raise GradSyncError(
                f"A window must begin without gradients, but {left or inside} parameters have one as {name} "
                f"begins its first. Call {drop}optimizer.zero_grad() after your own backwards. If they are of a "
                f"window that another {name}, or another function, left open, call its flush() or reset() before "
                "it goes."
            )

    def remember(self) -> None:
        """Called after a micro-batch."""
        gradients = [*map(_GRADIENT, self._watched)]
        self._left = gradients, [gradient._version for gradient in gradients if gradient is not None]

    def resume(self, team: Team) -> None:
        """Called after a window was loaded with its gradients."""
        self._watch(team)
        self.remember()

    def forget(self) -> None:
        """Called after the gradients were cleared."""
        self._left = None

    def check(self, name: str, index: int) -> None:
        """Raise if the gradients are not as they were left."""
        now = [*map(_GRADIENT, self._watched)]
        vanished = False
        if self._left is None:
            changed = any(gradient is not None for gradient in now)
            if self._team is not None and not now and not index:  # the engines keep all gradients inside
                changed = any(self._team.gradients_left())
        else:
            before, versions = self._left
            changed = any(map(is_not, now, before)) or versions != [g._version for g in now if g is not None]
            vanished = changed and any(new is None and old is not None for new, old in zip(now, before, strict=True))
        if changed:
            raise GradSyncError(
                f"{name} runs backward, step and zero_grad itself, but since its last micro-batch the gradients "
                + (
                    "vanished: something called zero_grad()"
                    if vanished
                    else "changed: something ran backward on them, or clipped, unscaled or divided them"
                )
                + ", in its body or between two calls. Return the unscaled loss and leave the rest to the decorator: "
                "accumulating(..., clip_norm=1.0) clips."
            )

    def _watch(self, team: Team) -> None:
        unowned = set(map(id, team.unowned))  # parameters of the models that no optimizer of the call has
        self._team, self._left = team, None
        self._watched = [parameter for parameter in team.watchable if id(parameter) not in unowned]


class Guarded(Protocol):
    """What a `StepGuard` asks."""

    name: str

    @property
    def guarded(self) -> bool:
        """Whether a step by the user would be wrong now."""
        ...

    def has_some_of(self, optimizer: Optimizer) -> bool:
        """Whether an optimizer steps parameters of ours."""
        ...


class StepGuard:
    """A step pre-hook of all optimizers: raises if the user steps a call's parameters in the middle of a window.

    Of all, because an optimizer that was made anew, or that steps in the backward, is none of the call's.
    """

    __slots__ = ("__weakref__", "_call")

    def __init__(self, call: Guarded) -> None:
        self._call = weakref.ref(call)

    def __call__(self, optimizer: Optimizer) -> None:
        """Called before the optimizer steps."""
        call = self._call()
        if call is not None and call.guarded and call.has_some_of(optimizer):
            raise GradSyncError(
                f"{call.name} steps its optimizer itself at each boundary, but something called "
                f"optimizer.step(), of type {type(optimizer).__name__}, in the middle of a window, on gradients that "
                "are not synchronised. Remove that call; an optimizer that steps in the backward cannot accumulate."
            )
