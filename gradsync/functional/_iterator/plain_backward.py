"""A backward that the user runs: hooks at parameters that notice it, and how the window synchronises in it.

`Arrivals` is called after gradients, `PlainBackward` before them; `InUsersBackward` synchronises.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from functools import partial
from typing import Any

import torch
from torch.autograd import Variable
from torch.autograd.graph import get_gradient_edge
from torch.nn.parameter import is_lazy

from gradsync._state import SILENT
from gradsync.functional._window.boundary import Held
from gradsync.functional._window.closing import Closing


class Arrivals:
    """Calls `came(parameter)` after each gradient that arrives at a parameter; `torch.autograd.grad` brings none.

    An empty hook costs 0.1 us for a parameter in each backward. A hook at autograd's node would cost 0.4 us,
    and still 0.3 after its removal, because the node keeps an empty table.
    """

    def __init__(self, leaves: Iterable[torch.Tensor], came: Callable[[torch.Tensor], None]) -> None:
        trained = [leaf for leaf in leaves if leaf.requires_grad]
        with _also_lazy():
            self._handles = [(leaf, leaf.register_post_accumulate_grad_hook(came)) for leaf in trained]

    def stop(self) -> None:
        """Call it no longer."""
        for leaf, handle in self._handles:
            handle.remove()
            hooks: Any = leaf
            if not hooks._post_accumulate_grad_hooks:
                hooks._post_accumulate_grad_hooks = None  # private in torch: an empty table is looked at for good
        self._handles = []


class PlainBackward:
    """Calls `begin` when the user's own `loss.backward()` comes to a parameter, before its gradient is there.

    Only what accumulates into these parameters counts: `torch.autograd.grad` does not, nor does another model's
    backward.
    """

    def __init__(self, leaves: Iterable[torch.Tensor], begin: Callable[[], object], swapped: Collection[int]) -> None:
        """`begin` is called at each parameter. `swapped` has the ids of leaves whose nodes must not be kept alive."""
        self.reached: set[int] = set()  # the ids of the leaves that the backward came to
        self._begin = begin
        self._handles: list[Any] = []
        self._nodes: list[Any] = []  # kept alive, because a leaf refers to its node weakly
        for leaf in leaves:
            if leaf.requires_grad and (id(leaf) in swapped or is_lazy(leaf)):
                # A tensor hook cannot tell torch.autograd.grad from a backward; nobody can call that for such a leaf.
                # A lazy one gets another node in its first forward.
                with _also_lazy():
                    self._handles.append(leaf.register_hook(partial(self._reach, id(leaf))))
            elif leaf.requires_grad:
                node = get_gradient_edge(leaf).node
                self._nodes.append(node)
                self._handles.append(node.register_prehook(partial(self._reach, id(leaf))))

    def stop(self) -> None:
        """Watch no longer. A leaf that is resized in place needs a new node: none is kept alive from now on."""
        for handle in self._handles:
            handle.remove()
        self._handles, self._nodes = [], []

    def _reach(self, leaf: int, _: object) -> None:
        if leaf in SILENT:
            return
        self.reached.add(leaf)
        self._begin()


class InUsersBackward:
    """Synchronises in a backward of the user's that has begun already; `done(closing)` is called at its end."""

    __slots__ = ("_done", "_has_ended", "_passage", "_reached", "_waits")

    def __init__(self, passage: Held, reached: set[int], done: Callable[[Closing | None], None]) -> None:
        """`reached` has the ids of the leaves that the backward has come to."""
        self._passage = passage.__enter__()
        self._reached = reached
        self._done = done
        self._waits = False  # whether all gradients are there, so that it can only wait for other ranks
        self._has_ended = False
        passage.order.arm(None)
        # Queued twice: the reducer queues its own callback when its last bucket leaves, and ours must come after it.
        Variable._execution_engine.queue_callback(self._arrived)

    def over(self) -> bool:
        """After the backward: complete the collectives if it failed; returns whether it failed waiting for ranks."""
        if self._has_ended or self._waits:
            return not self._has_ended
        self._has_ended = True
        self._note_visits()
        self._passage.__exit__(None, RuntimeError("a backward of the user's own, which raises its own error"), None)
        return False

    def _arrived(self) -> None:
        self._waits = True
        Variable._execution_engine.queue_callback(self._finish)

    def _finish(self) -> None:
        self._note_visits()
        self._has_ended = True
        self._passage.__exit__(None, None, None)
        self._done(self._passage.closing)

    def _note_visits(self) -> None:
        for engine in self._passage.order.armed:
            if not self._reached.isdisjoint(map(id, engine.leaves)):
                engine.note_visit()


# A context in which parameters of lazy modules (on one rank) take hooks before they have a shape, and keep them.
_also_lazy = torch._C.DisableTorchFunctionSubclass
