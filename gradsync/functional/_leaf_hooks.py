"""Hooks at the parameters, for the two things that only show there: a backward that we do not run, and a replay."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

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
        """Take the hooks away; again is fine."""
        for handle in self._handles:
            handle.remove()
        self._handles = []


class PlainBackward:
    """Tells when the user's own `loss.backward()` comes to a parameter, before its gradient is there.

    What counts is what accumulates: `torch.autograd.grad`, or a backward of other models, does not.
    """

    def __init__(
        self, leaves: Iterable[torch.Tensor], begin: Callable[[], None], swapped: Collection[int] = ()
    ) -> None:
        """`begin` is called at each parameter; `swapped` are the ids of those whose nodes nobody may hold."""
        self.reached: set[int] = set()  # the ids of the leaves that it came to
        self._begin = begin
        trained = [leaf for leaf in leaves if leaf.requires_grad]
        # The nodes are kept, for a leaf keeps its own weakly.
        self._nodes = [(get_gradient_edge(leaf).node, id(leaf)) for leaf in trained if id(leaf) not in swapped]
        self._handles = [node.register_prehook(partial(self._reach, leaf)) for node, leaf in self._nodes]
        flat = [
            leaf for leaf in trained if id(leaf) in swapped
        ]  # of no use to torch.autograd.grad, which these tell of
        self._handles += [leaf.register_hook(partial(self._reach, id(leaf))) for leaf in flat]

    def remove(self) -> None:
        """Take the hooks away; again is fine."""
        for handle in self._handles:
            handle.remove()
        self._handles, self._nodes = [], []

    def _reach(self, leaf: int, _: object) -> None:
        self.reached.add(leaf)
        self._begin()


def weightless(leaves: Iterable[torch.Tensor]) -> LeafHooks:
    """Replace gradients by zeros when they arrive: exact where `loss * 0` is not, with an inf or a NaN in it."""
    return LeafHooks(leaves, lambda gradient: None if gradient is None else torch.zeros_like(gradient))
