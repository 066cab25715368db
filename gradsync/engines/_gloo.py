"""Leaving a gloo group without a crash.

A script that has used gloo and ends may die with `terminate called without an active exception` (torch 2.13, CPython
3.11; measured in 7 of 20 runs). The cause: a gloo worker thread drops the last reference to a finished operation after
it has woken whoever waited for it. That operation holds Python objects (the caller's tensor, the context that autograd
stores), so the worker asks for the GIL; if the interpreter is finalising by then, CPython ends the thread with
`pthread_exit`, which unwinds through a destructor that may not throw. `destroy_process_group` does not help: the
workers end with the group's last reference, and any living DDP holds one. See pytorch#190489.

The cure: wait until no worker has anything to drop. It touches nothing of the user's, and needs no other rank, because
an all_reduce of no elements stays on this rank.
"""

from __future__ import annotations

import sys
import threading
import time
import weakref
from typing import Any

import torch
import torch.distributed as dist

_LIMIT = 5.0  # seconds; a worker that hangs on a lost rank is left as it is


def settle_all_groups(limit: float = _LIMIT) -> bool:
    """Wait until the workers of all gloo groups hold nothing; False if that took too long. A few milliseconds.

    Call it last: this rank's operations no longer pair with those of the other ranks after it.
    """
    deadline = time.monotonic() + limit
    return all(_settle_group(group, deadline) for group in list(dist.distributed_c10d._world.pg_map))


def _settle_group(group: dist.ProcessGroup, deadline: float) -> bool:
    try:
        backend = group._get_backend(torch.device("cpu"))
    except RuntimeError:  # a group without CPU tensors
        return True
    backend = getattr(backend, "wrapped_pg", backend)  # under TORCH_DISTRIBUTED_DEBUG=DETAIL
    kind = getattr(dist, "ProcessGroupGloo", None)
    return kind is None or not isinstance(backend, kind) or _settle(backend, deadline)


def _settle(backend: Any, deadline: float) -> bool:
    # A worker that begins an operation has dropped the one before. So queue operations until each worker has dropped
    # one. A weak reference to the operation's tensor tells which thread dropped it.
    seen: set[int] = set()
    while len(seen) < backend.options._threads:
        known, released = len(seen), threading.Event()
        watch = _queue_dropped(backend, seen, released)
        left = deadline - time.monotonic()
        if left <= 0 or not released.wait(left):
            return False
        del watch  # not before: a weak reference that dies first tells nothing
        if len(seen) == known:
            time.sleep(0.001)  # the missing worker is still busy
    # The last operation may still be being dropped, under the queue's lock: queueing one more waits for that. This
    # function keeps the tensor of that one, so that dropping it only lowers a count, and needs no GIL in the end.
    tensor = torch.empty(0, device="cpu")
    unshared = sys.getrefcount(tensor)
    backend.allreduce([tensor])
    while sys.getrefcount(tensor) > unshared:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.0001)
    return True


def _queue_dropped(backend: Any, seen: set[int], released: threading.Event) -> weakref.ref[torch.Tensor]:
    """Queue an operation whose tensor only its worker holds; `seen` gets the id of the thread that drops it."""
    caller = threading.get_ident()

    def note(_: object) -> None:
        if threading.get_ident() != caller:
            seen.add(threading.get_ident())
        released.set()

    tensor = torch.empty(0, device="cpu")
    watch = weakref.ref(tensor, note)
    backend.allreduce([tensor])
    return watch
