"""Hooks at the parameters: to notice a backward that the user runs, and to make the gradients of a replay zeros."""

from __future__ import annotations

from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.graph import get_gradient_edge

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator


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
        # The nodes are kept alive here, because a leaf refers to its node weakly. When this object goes, they must go
        # at once: a leaf that is resized in place needs a new one. So nothing in this list refers to this object.
        nodes = [(get_gradient_edge(leaf).node, id(leaf)) for leaf in trained if id(leaf) not in swapped]
        self._places: list[tuple[Callable[..., Any], int]] = [(node.register_prehook, leaf) for node, leaf in nodes]
        # A tensor hook cannot tell torch.autograd.grad from a backward, but nobody can call that for such a leaf.
        self._places += [(leaf.register_hook, id(leaf)) for leaf in trained if id(leaf) in swapped]
        self._handles: list[Any] = []

    def watch(self) -> PlainBackward:
        """Begin to watch. It may be done again after `stop`."""
        self._handles = [register(partial(self._reach, leaf)) for register, leaf in self._places]
        return self

    def stop(self) -> None:
        """Watch no longer. May be called twice."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _reach(self, leaf: int, _: object) -> None:
        self.reached.add(leaf)
        self._begin()


@contextmanager
def weightless(leaves: Iterable[torch.Tensor]) -> Iterator[None]:
    """A context in which gradients are replaced by zeros, which `loss * 0` would not do for an inf or a NaN."""
    handles = [leaf.register_hook(_zeros) for leaf in leaves if leaf.requires_grad]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _zeros(gradient: torch.Tensor | None) -> torch.Tensor | None:
    return None if gradient is None else torch.zeros_like(gradient)
