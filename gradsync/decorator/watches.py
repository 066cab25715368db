"""Watches that raise if the user's code changes gradients or steps the optimizer in the middle of a window."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, Protocol

from torch.nn.modules.module import register_module_forward_pre_hook

from gradsync._errors import GradSyncError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    import torch
    from torch import nn

    from gradsync.functional import Team


class GradientWatch:
    """Watches one gradient, which is cheap, to notice whether other code has changed the gradients."""

    __slots__ = ("_gradient", "_parameter", "_team", "_version")

    def __init__(self) -> None:
        self._team: Team | None = None
        self._parameter: nn.Parameter | None = None
        self._gradient: torch.Tensor | None = None  # as the last micro-batch left it
        self._version = 0  # and its version then

    def begin(self, name: str, team: Team) -> None:
        """Called when a window opens. The first window of a team must find no gradients."""
        if team is self._team:
            return
        self._team, self._parameter, self._gradient = team, None, None
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
        if self._parameter is None and self._team is not None:
            self._parameter = next((p for p in self._team.watchable if p.grad is not None), None)
        if self._parameter is not None:
            self._gradient = self._parameter.grad
            self._version = 0 if self._gradient is None else self._gradient._version

    def resume(self, team: Team) -> None:
        """Called after a window was loaded with its gradients."""
        self._team, self._parameter = team, None
        self.remember()

    def forget(self) -> None:
        """Called after the gradients were cleared."""
        self._gradient = None

    def check(self, name: str, index: int) -> None:
        """Raise if the gradients are not as they were left."""
        if self._parameter is None:
            if index or self._team is None or not any(self._team.gradients_left()):
                return
        else:
            gradient = self._parameter.grad
            if gradient is self._gradient and (gradient is None or gradient._version == self._version):
                return
        vanished = self._parameter is not None and self._parameter.grad is None
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


class Guarded(Protocol):
    """What a `StepGuard` asks."""

    name: str

    @property
    def guarded(self) -> bool:
        """Whether a step by the user would be wrong now."""
        ...


class StepGuard:
    """An optimizer's step pre-hook: raises if the user steps it in the middle of a window."""

    __slots__ = ("_call",)

    def __init__(self, call: Guarded) -> None:
        self._call = weakref.ref(call)

    def __call__(self, *_: object) -> None:
        """Called before the optimizer steps."""
        call = self._call()
        if call is not None and call.guarded:
            raise GradSyncError(
                f"{call.name} steps its optimizer itself at each boundary, but something called "
                "optimizer.step() in the middle of a window, on gradients that are not synchronised. Remove that call."
            )


class ForwardWatch:
    """Context manager: true after a forward of these models, or of a module in them, has begun."""

    def __init__(self, models: Iterable[nn.Module], begin: Callable[[], None]) -> None:
        """`begin` is called when the first forward begins."""
        self._ids = {id(module) for model in models for module in model.modules()}
        self._begin = begin
        self._began = False

    def __enter__(self) -> None:
        # torch's hook for all modules, because a body may call any of them.
        self._hook = register_module_forward_pre_hook(self._see) if self._ids else None

    def __exit__(self, *_: object) -> None:
        if self._hook is not None:
            self._hook.remove()

    def __bool__(self) -> bool:
        return self._began

    def _see(self, module: nn.Module, _: Any) -> None:
        if not self._began and id(module) in self._ids:
            self._began = True
            self._begin()


def check_first(runs: Sequence[bool], name: str) -> None:
    """Raise if a rank dropped its very first micro-batch, and so has none to repeat."""
    cannot = ", ".join(str(rank) for rank, one in enumerate(runs) if not one)
    if cannot:
        raise GradSyncError(
            f"The first micro-batch of {name} must be a good one on every rank where the engine's forward "
            f"communicates, to be repeated in place of those that `skip` drops, but rank {cannot} dropped "
            "it. Look for a good one before the loop begins."
        )
