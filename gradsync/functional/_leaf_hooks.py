"""Hooks at the parameters: to notice a backward that the user runs, and to make the gradients of a replay zeros."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.graph import get_gradient_edge

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable


class LeafHooks:
    """Tensor hooks on some parameters, and their removal."""

    def __init__(
        self, leaves: Iterable[torch.Tensor], hook: Callable[[torch.Tensor | None], torch.Tensor | None]
    ) -> None:
        self._handles = [leaf.register_hook(hook) for leaf in leaves if leaf.requires_grad]

    def remove(self) -> None:
        """Remove the hooks. May be called twice."""
        for handle in self._handles:
            handle.remove()
        self._handles = []


class PlainBackward:
    """Calls `begin` when the user's own `loss.backward()` comes to a parameter, before its gradient is there.

    Only what accumulates into these parameters counts: `torch.autograd.grad` does not, nor does another model's
    backward.
    """

    def __init__(
        self, leaves: Iterable[torch.Tensor], begin: Callable[[], object], swapped: Collection[int] = ()
    ) -> None:
        """`begin` is called at each parameter. `swapped` has the ids of leaves whose nodes must not be kept alive."""
        self.reached: set[int] = set()  # the ids of the leaves that the backward came to
        self._begin = begin
        trained = [leaf for leaf in leaves if leaf.requires_grad]
        # The nodes are kept alive here, because a leaf refers to its node weakly.
        nodes = [(get_gradient_edge(leaf).node, leaf) for leaf in trained if id(leaf) not in swapped]
        self._registers = [partial(node.register_prehook, partial(self._reach, id(leaf))) for node, leaf in nodes]
        # A tensor hook cannot tell torch.autograd.grad from a backward, but nobody can call that for such a leaf.
        flat = [leaf for leaf in trained if id(leaf) in swapped]
        self._registers += [partial(leaf.register_hook, partial(self._reach, id(leaf))) for leaf in flat]
        self._handles: list[Any] = []

    def watch(self) -> PlainBackward:
        """Begin to watch. It may be done again after `stop`."""
        self._handles = [register() for register in self._registers]
        return self

    def stop(self) -> None:
        """Watch no longer. May be called twice."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _reach(self, leaf: int, _: object) -> None:
        self.reached.add(leaf)
        self._begin()


def weightless(leaves: Iterable[torch.Tensor]) -> LeafHooks:
    """Hooks that replace gradients by zeros, which `loss * 0` would not do for an inf or a NaN."""
    return LeafHooks(leaves, lambda gradient: None if gradient is None else torch.zeros_like(gradient))
