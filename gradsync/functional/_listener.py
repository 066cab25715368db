"""An ear for each rank: what others say through the store is heard while this one is busy in a backward."""

from __future__ import annotations

import atexit
import json
import weakref
from contextlib import suppress
from datetime import timedelta
from secrets import token_hex
from threading import Thread
from typing import TYPE_CHECKING, Any

from gradsync.functional._agreement import at_the_store

if TYPE_CHECKING:
    import torch.distributed as dist

_FOREVER = timedelta(days=20)  # what poll can count in milliseconds; torch prints a warning for each wait in vain
_FAREWELL = 1.0  # seconds for a listener to end
_KEPT = 64  # notices; whose loop goes on has taken note of its own long before


class Listener(Thread):
    """Hears notices: of which loop, and from which synchronisation on. It blocks in the store, and costs nothing there.

    It has a copy of the store to itself, for one that waits keeps all others of the same copy waiting.
    """

    def __init__(self, store: Any, copy: Any) -> None:
        super().__init__(name="gradsync: listener", daemon=True)
        self.inbox = f"gradsync/inbox/{token_hex(8)}"
        self.heard: dict[str, int] = {}  # by the loop's token, the number of the first synchronisation
        self._store, self._copy = store, copy

    def run(self) -> None:
        number, copy = 0, self._copy
        with suppress(RuntimeError):  # the store is gone, and who would give notice finds that out too
            while True:
                number += 1
                letter = f"{self.inbox}/{number}"
                copy.wait([letter], _FOREVER)
                token, turn = json.loads(copy.get(letter))
                if not token:
                    return
                self.heard.setdefault(token, turn)
                copy.set(receipt(self.inbox, token), "")
                copy.delete_key(letter)
                while len(self.heard) > _KEPT:
                    self._forget(next(iter(self.heard)))

    def _forget(self, token: str) -> None:
        self.heard.pop(token)
        for key in (receipt(self.inbox, token), turn_to_write(token)):
            self._copy.delete_key(key)

    def dismiss(self) -> None:
        """It is needed no longer: let it end, or leave it if the store does not answer."""
        if self.is_alive():
            teller = Thread(target=_say_goodbye, args=(self._store, self.inbox), daemon=True)
            teller.start()
            teller.join(_FAREWELL)
            self.join(_FAREWELL)


def write(store: Any, inbox: str, token: str, turn: int) -> None:
    """Say to whoever listens there that a loop is told about from synchronisation `turn` on."""
    store.set(f"{inbox}/{store.add(inbox, 1)}", json.dumps([token, turn]))


def turn_to_write(token: str) -> str:
    """The counter that lets one rank write to all, of those that want to say the same."""
    return f"gradsync/notice/{token}"


def receipt(inbox: str, token: str) -> str:
    """The key that is set in the store as this has been heard."""
    return f"{inbox}/{token}"


# One a group, from its first loop to the group's end: a memo, for each is a thread and a connection.
_LISTENERS: weakref.WeakKeyDictionary[dist.ProcessGroup, Listener] = weakref.WeakKeyDictionary()


def listener(group: dist.ProcessGroup, loop: str) -> Listener | None:
    """That of this rank in `group`; None if the store is one of somebody's own that cannot be copied."""
    found = _LISTENERS.get(group)
    if found is None or not found.is_alive():
        store: Any = group.get_group_store()
        try:
            found = Listener(store, at_the_store(group, f"the beginning of {loop}", store.clone))
        except (NotImplementedError, AttributeError):
            return None
        found.start()
        _LISTENERS[group] = found
        weakref.finalize(group, found.dismiss).atexit = False
    return found


def _say_goodbye(store: Any, inbox: str) -> None:
    with suppress(RuntimeError):
        write(store, inbox, "", 0)


@atexit.register
def dismiss_all() -> None:
    """Before the store goes, which torch complains of aloud; and before the interpreter ends.

    A thread that comes back from the store later than that takes the process down with it.
    """
    for one in list(_LISTENERS.values()):
        one.dismiss()
