"""All state at module level of this package, and why there is no other place for it.

An engine cannot be kept on its module: copies and pickles of the module would carry it along. Nor can the function that
made it keep it: the next function, or the next epoch's `sync_every`, would make another DDP. Two functions that share a
parameter do not know of each other, nor do two loops of a thread, nor a hook of torch's of the function whose optimizer
steps. The end of the program, and a warning that is given once, belong to the process. What refers to an object of the
user's is weak, and ends with it.

A few facts stand on objects of the user's themselves, in attributes that begin with `_gradsync_`: what is known of a
DDP's reducer, how many hold a teacher's parameter, whether a parameter on FSDP2 was trained, whether a gradient was
left behind, a scheduler's updates.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from threading import Lock
from typing import Any

from torch import nn

MAKERS: dict[type, Callable[[Any], Any]] = {}
"""Engines registered with `engines.register`, by the class of the wrapper."""

BEHIND: weakref.WeakKeyDictionary[nn.Module, list[Any]] = weakref.WeakKeyDictionary()
"""The DDPs behind each bare module. They refer to its parameters, not to the module, so an entry dies with it."""

WIRES: weakref.WeakKeyDictionary[nn.Module, tuple[Any, Any, Any]] = weakref.WeakKeyDictionary()
"""A DDP's reducer's parameters, their nodes in autograd's graph, where its hooks are (copies must not have them), and
their layouts."""

LATE: weakref.WeakSet[Any] = weakref.WeakSet()
"""Whose gradients may travel (`overlap`). Before another window uses their parameters, they `settle`."""

ALL_RUNS: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
"""The runs of all functions and loops, by id. A parameter can be in the open window of one of them only."""

LOOPS: weakref.WeakSet[Any] = weakref.WeakSet()
"""The loops that are under way, of all functions: in one at a time, ranks may have different numbers of items."""

RUNNERS: weakref.WeakSet[Any] = weakref.WeakSet()
"""Those of all decorated functions: as the program ends, windows that are still open are warned about."""

STEPPING: list[int] = []
"""The threads in which gradsync itself steps an optimizer, perhaps for another function whose gradients landed."""

SWITCHING = Lock()
"""Held while `requires_grad` of a bystander is switched: two threads may hold the same teacher."""

SILENT: set[int] = set()
"""The ids of parameters whose hooks gradsync runs now, without a gradient: that is no backward of the user's."""

SAID_OF_TORCH: set[str] = set()
"""Warnings about an unknown torch that were given already: each is given once a process, whatever the filters."""

MESHES: dict[tuple[Any, ...], Any] = {}
"""Meshes of `verify`: each of its cells makes a model, and their process groups would pile up."""

STEP_HOOK: list[Any] = []
"""The one hook before the steps of all optimizers, once it has been needed; it stays."""

STEP_WATCHERS: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
"""Whom that hook asks, by id."""


def open_runs() -> list[Any]:
    """The runs that have an open window."""
    runs = [ref() for ref in ALL_RUNS.valuerefs()]  # a list at once: other threads may begin runs
    return [run for run in runs if run is not None and run.window is not None]
