"""Word from one rank to all that it brings something else than planned: nothing to send as long as it does not.

While each rank brings what the plan says, everybody knows what everybody brings. A rank that is about to synchronise
anything else gives notice first, through the store, and waits until every rank has heard it. As no synchronisation ends
without all ranks, whoever has come to the end of that one knows of the notice: it is told what the ranks brought, and
from then on tables travel with the gradients.
"""

from __future__ import annotations

import atexit
import weakref
from contextlib import suppress
from datetime import timedelta
from secrets import token_hex
from threading import Thread
from threading import enumerate as running_threads
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from gradsync.functional._agreement import at_the_store, wait_for
from gradsync.functional._plan import Plan

if TYPE_CHECKING:
    from gradsync.functional._tally import Row

_SLICE = timedelta(seconds=0.5)  # how long a listener may take to see that it was dismissed


def new_token() -> str:
    """What tells one notice from another; the ranks agree on one of theirs."""
    return token_hex(8)


# Copies of a group's store that no listener uses just now: a memo, for each is a connection of its own.
_SPARE: weakref.WeakKeyDictionary[dist.ProcessGroup, list[Any]] = weakref.WeakKeyDictionary()


def _copies(group: dist.ProcessGroup) -> list[Any] | None:
    """At least one copy of the group's store, for one that waits keeps the others waiting; None if it cannot be had."""
    spare = _SPARE.setdefault(group, [])
    if not spare:
        store: Any = group.get_group_store()
        try:
            spare.append(store.clone())
        except (NotImplementedError, AttributeError):  # one of somebody's own, and that on every rank
            return None
    return spare


class Notice:
    """Of the windows that one loop synchronises, from which one on they are told about."""

    __slots__ = ("__weakref__", "_base", "_group", "_listener", "_plan", "_rank", "_taken", "_turn", "_what")

    def __init__(
        self, group: dist.ProcessGroup | None = None, plan: Plan | None = None, token: str = "", loop: str = ""
    ) -> None:
        """`plan` and `token` are common to the ranks of `group`; without a group, all windows are told about."""
        self._group = group
        self._rank = 0 if group is None else group.rank()
        self._plan = plan or Plan(())
        self._what = f"the first window of {loop} that is not as planned on every rank"
        self._base = f"gradsync/notice/{token}"
        self._turn = 0
        self._taken = 0  # micro-batches that full windows have had in these turns
        self._listener: _Listener | None = None
        stores = None if group is None else _copies(group)
        if group is not None and stores is not None:
            self._listener = _Listener(stores, f"{self._base}/{group.rank()}")
            self._listener.start()
            weakref.finalize(self, _Listener.dismiss, self._listener).atexit = False

    @property
    def rides(self) -> bool:
        """Whether the coming synchronisation takes a table along: the same answer on every rank."""
        return self._listener is None or (self._listener.since is not None and self._listener.since < self._turn)

    def announce(self, row: Row, size: int) -> None:
        """Before a window of `size` synchronises: if this rank's `row` is not as planned, make sure that all know."""
        group = self._group
        if group is None or self._listener is None or self._listener.since is not None:
            return
        if self._plan.expects(row, self._rank, self._taken, size):
            return

        def talk() -> None:
            store: Any = group.get_group_store()
            names = [f"{self._base}/{rank}" for rank in range(group.size())]
            first = store.add(self._base, 1) == 1  # else another rank is about to say the same
            for name in names if first else ():
                store.set(name, str(self._turn))
            wait_for(store, [f"{name}/heard" for name in names], group, self._what)
            for name in names if first else ():
                store.delete_key(name)

        at_the_store(group, self._what, talk)

    def passed(self, size: int) -> bool:
        """One more synchronisation, of a window of `size`, has ended; whether its table is to be told now."""
        turn, self._turn = self._turn, self._turn + 1
        self._taken += size
        return self._listener is not None and self._listener.since == turn

    def planned(self, size: int) -> list[Row] | None:
        """What all ranks brought to the window of `size` that has ended last, if none has told; None: full ones."""
        return self._plan.rows(self._taken - size, size)


class _Listener(Thread):
    """Waits for notice. A thread, because it is heard while the main one is in a backward that waits for the giver."""

    def __init__(self, stores: list[Any], name: str) -> None:
        super().__init__(name="gradsync: notice", daemon=True)
        self.since: int | None = None  # the number of the first synchronisation that is told about
        self._stores = stores  # where it leaves its own for the next
        self._store = stores.pop()
        self._key = name
        self._dismissed = False

    def run(self) -> None:
        with suppress(dist.DistNetworkError):  # the store is gone, and who would give notice finds that out too
            while not self._dismissed and self.since is None:
                self._wait()
            self._stores.append(self._store)

    def _wait(self) -> None:
        try:
            self._store.wait([self._key], _SLICE)
        except dist.DistNetworkError:
            raise
        except RuntimeError:  # a time-out: DistStoreError from a TCPStore, its parent from a FileStore
            return
        self.since = int(self._store.get(self._key))
        self._store.set(f"{self._key}/heard", "")

    def dismiss(self) -> None:
        """It is needed no longer."""
        self._dismissed = True


@atexit.register
def _dismiss_all() -> None:
    """A thread that comes back from the store as the interpreter ends takes the process down with it."""
    listeners = [thread for thread in running_threads() if isinstance(thread, _Listener)]
    for listener in listeners:
        listener.dismiss()
    for listener in listeners:
        listener.join(2 * _SLICE.total_seconds())
