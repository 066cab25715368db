"""The first forward of a call, where forwards communicate: whether it has begun, and whether every rank runs it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.nn.modules.module import register_module_forward_pre_hook

from gradsync._errors import GradSyncError
from gradsync.ranks.meet import ranks_where

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from torch import nn


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
    cannot = ranks_where(not one for one in runs)
    if cannot:
        raise GradSyncError(
            f"The first micro-batch of {name} must be a good one on every rank where the engine's forward "
            f"communicates, to be repeated in place of those that `skip` drops, but rank {cannot} dropped "
            "it. Look for a good one before the loop begins."
        )
