"""What keeps a window from being spoiled unseen: watches over gradients, steps and forwards, and two refusals."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, Protocol

from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from gradsync._errors import GradSyncError
from gradsync.functional._agreement import ranks_where

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    import torch

    from gradsync.functional._open_window import OpenWindow


class GradientWatch:
    """Watches one gradient: it tells, at little cost, whether somebody else touched them."""

    __slots__ = ("_gradient", "_parameter", "_version")

    def __init__(self) -> None:
        self._parameter: nn.Parameter | None = None
        self._gradient: torch.Tensor | None = None  # as the last micro-batch left it,
        self._version = 0  # and how often it had been written to

    @property
    def is_new(self) -> bool:
        """Whether there is no gradient to watch yet."""
        return self._parameter is None

    def remember(self, parameters: Sequence[nn.Parameter]) -> None:
        """A micro-batch has ended."""
        if self._parameter is None:
            self._parameter = next((parameter for parameter in parameters if parameter.grad is not None), None)
            if self._parameter is None:
                return
        self._gradient = self._parameter.grad
        self._version = 0 if self._gradient is None else self._gradient._version

    def forget(self) -> None:
        """The gradients are gone, as they should be."""
        self._gradient = None

    def check(self, name: str, window: OpenWindow, *, is_open: bool) -> None:
        """Raise if the gradients are not as they were left."""
        if self._parameter is None:
            if is_open or not any(window.gradients_left()):
                return
        else:
            gradient = self._parameter.grad
            if gradient is self._gradient and (gradient is None or gradient._version == self._version):
                return
        vanished = self._parameter is not None and self._parameter.grad is None
        raise GradSyncError(
            f"{name} runs backward, step and zero_grad itself, but since its last micro-batch the gradients "
            + ("vanished: something called zero_grad()" if vanished else "changed: something ran backward on them")
            + ", in its body or between two calls. Return the unscaled loss and leave the rest to the decorator."
        )


class Guarded(Protocol):
    """Whose optimizer a `StepGuard` watches."""

    name: str

    @property
    def guarded(self) -> bool:
        """Whether a step of somebody else's would do harm now."""
        ...


class StepGuard:
    """An optimizer's step pre-hook: nobody else may step it in the middle of a window."""

    __slots__ = ("_accumulation",)

    def __init__(self, accumulation: Guarded) -> None:
        self._accumulation = weakref.ref(accumulation)

    def __call__(self, *_: object) -> None:
        accumulation = self._accumulation()
        if accumulation is not None and accumulation.guarded:
            raise GradSyncError(
                f"{accumulation.name} steps its optimizer itself at each boundary, but something called "
                "optimizer.step() in the middle of a window, on gradients that are not synchronised. Remove that call."
            )


class ForwardWatch:
    """Context manager: true once a forward of one of these models, or of a module in them, has begun."""

    def __init__(self, models: Iterable[nn.Module], begin: Callable[[], None]) -> None:
        """`begin` is called as the first of them begins."""
        self._ids = {id(module) for model in models for module in model.modules()}
        self._begin = begin
        self._began = False

    def __enter__(self) -> None:
        # torch's hook for all modules: a body may call any of them.
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


def check_replays(can_replay: Sequence[bool], name: str) -> None:
    """Raise if a rank would have to repeat a call that it never made."""
    cannot = ranks_where(not can for can in can_replay)
    if cannot:
        raise GradSyncError(
            f"Every rank needs at least one item in {name}.over where the engine's forward communicates, to repeat its "
            f"call with when it has run out, but rank {cannot} has none. Give each rank an item."
        )


def check_first(runs: Sequence[bool], name: str) -> None:
    """Raise if a rank dropped the very first micro-batch, where it would have to repeat one that it ran."""
    cannot = ranks_where(not one for one in runs)
    if cannot:
        raise GradSyncError(
            f"The first micro-batch of {name} must be a good one on every rank where the engine's forward "
            f"communicates, to be repeated in place of those that `skip` drops, but rank {cannot} dropped "
            "it. Look for a good one before the loop begins."
        )


def check_sure(unsure: Sequence[bool], name: str) -> None:
    """Raise if a rank without an item cannot know which of several windows the others' loops go through."""
    lost = ranks_where(unsure)
    if lost:
        raise GradSyncError(
            f"Every rank needs at least one item in {name}.over where several models, optimizers or functions have "
            f"windows of their own, to know which of them it goes through, but rank {lost} has none. Give "
            "each rank an item, or each window a loop of its own."
        )


def check_sync_batchnorm(models: Iterable[nn.Module], num_items: Sequence[int | None], name: str) -> None:
    """Raise if the ranks' lengths may differ where a forward waits for all ranks."""
    if None not in num_items and len(set(num_items)) == 1:
        return
    if any(isinstance(module, nn.SyncBatchNorm) for model in models for module in model.modules()):
        lengths = ", ".join(f"rank {rank} has {'?' if n is None else n}" for rank, n in enumerate(num_items))
        raise GradSyncError(
            f"SyncBatchNorm waits for every rank in each forward, so that all need equally many items in {name}.over, "
            f"but {lengths}. Give each rank as many, in an iterable with a length."
        )
