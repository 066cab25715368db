"""All that this package remembers at module level, and why: torch leaves no other place for it.

A module's engine cannot be kept on the module (copies and pickles of it would carry it along) nor by who made it (the
next function, or the next epoch's `sync_every`, would make another DDP). Two functions that share a parameter know
nothing of each other. Everything is held weakly by what it belongs to.
"""

from __future__ import annotations

import weakref
from threading import Lock
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

MAKERS: dict[type, Callable[[Any], Any]] = {}
"""What `engines.register` was told, by the class of the wrapper."""

BEHIND: weakref.WeakKeyDictionary[nn.Module, list[Any]] = weakref.WeakKeyDictionary()
"""The DDPs behind a bare module. They hold its parameters, not the module, so that an entry dies with its module."""

WIRES: weakref.WeakKeyDictionary[nn.Module, tuple[Any, Any]] = weakref.WeakKeyDictionary()
"""A DDP's reducer's parameters, and their nodes in autograd's graph, where its hooks are: copies must not have them."""

TRAVELLING: weakref.WeakSet[Any] = weakref.WeakSet()
"""The windows whose gradients travel (`overlap`): before others use their parameters, they `settle`."""

OPEN: weakref.WeakSet[Any] = weakref.WeakSet()
"""The windows that are open now, of whatever function: a parameter can be in one of them only."""

STEPPING: set[int] = set()
"""The threads in which a step of gradsync's own runs: of another function, perhaps, whose gradients land."""

SWITCHING = Lock()
"""Held while `requires_grad` of a bystander is switched: two threads may hold one teacher at once."""

SAID_OF_TORCH: set[str] = set()
"""Warnings about a torch that engines may not know: once in a process is enough, whatever the filters say."""
