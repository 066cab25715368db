"""Hooks: at parameters, for a backward of the user's own and for replays; at forwards, for an engine out of sight."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.parameter import is_lazy

from gradsync._errors import GradSyncError
from gradsync._state import SILENT
from gradsync.engines import is_engine


class Arrivals:
    """Calls `came(parameter)` after each gradient that arrives at a parameter; `torch.autograd.grad` brings none.

    An empty hook costs 0.1 us for a parameter in each backward. At a node of autograd's it would cost 0.4, and 0.3 for
    good once it is removed, because a node never forgets that it had one.
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


# A context in which parameters of lazy modules (on one rank) take hooks before they have a shape, and keep them.
_also_lazy = torch._C.DisableTorchFunctionSubclass


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


class HiddenEngineWatch:
    """Context manager: inside, the forward of a wrapper that is not among the models, but has their parameters, raises.

    It would synchronise beside the team's own engine, and where ranks differ, while others do something else.
    """

    def __init__(self, name: str, models: Iterable[nn.Module], ids: Collection[int]) -> None:
        """`ids` has the ids of the parameters that are trained."""
        self._name = name
        self._known = {id(module) for model in models for module in model.modules()}
        self._ids = ids

    def __enter__(self) -> None:
        self._hook = register_module_forward_pre_hook(self._see)  # of all modules: the body may call any

    def __exit__(self, *_: object) -> None:
        self._hook.remove()

    def _see(self, module: nn.Module, _: Any) -> None:
        if not is_engine(type(module)) or id(module) in self._known:
            return
        if any(id(parameter) in self._ids for parameter in module.parameters()):
            kind = type(module).__name__
            raise GradSyncError(
                f"A model on a {kind} must come to {self._name} as that {kind}, but the module inside it came, and the "
                f"body calls the {kind}: both would synchronise. Pass the {kind}, as an argument or by model=, or call "
                "the module that came."
            )
