"""Hooks at the parameters, for the two things that only show there: a backward that we do not run, and a replay."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable


class LeafHooks:
    """Tensor hooks on some parameters, and their removal."""

    def __init__(
        self, leaves: Iterable[torch.Tensor], hook: Callable[[torch.Tensor | None], torch.Tensor | None]
    ) -> None:
        self._handles = [leaf.register_hook(hook) for leaf in leaves if leaf.requires_grad]

    def remove(self) -> None:
        """Take the hooks away; again is fine."""
        for handle in self._handles:
            handle.remove()
        self._handles = []


class PlainBackward(LeafHooks):
    """Calls `begin` as the user's own `loss.backward()` reaches the first parameter, before any gradient is there."""

    def __init__(self, leaves: Iterable[torch.Tensor], begin: Callable[[], None]) -> None:
        self.began = False
        self._begin = begin
        super().__init__(leaves, self._reached)

    def _reached(self, _: torch.Tensor | None) -> None:
        if not self.began:
            self.began = True
            self._begin()


def weightless(leaves: Iterable[torch.Tensor]) -> LeafHooks:
    """Replace gradients by zeros as they arrive: exact where `loss * 0` is not, with an inf or a NaN in it."""
    return LeafHooks(leaves, lambda gradient: None if gradient is None else torch.zeros_like(gradient))
