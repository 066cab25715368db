"""Word from one rank to all that it brings something else than planned: nothing to send as long as it does not.

While each rank brings what the plan says, everybody knows what everybody brings. A rank that is about to synchronise
anything else gives notice first, through the store, and waits until every rank has heard it. As no synchronisation ends
without all ranks, whoever has come to the end of that one knows of the notice: it is told what the ranks brought, and
from then on tables travel with the gradients.
"""

from __future__ import annotations

from secrets import token_hex
from typing import TYPE_CHECKING, Any

from gradsync.functional._agreement import at_the_store, wait_for
from gradsync.functional._listener import listener, receipt, turn_to_write, write
from gradsync.functional._plan import Plan

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch.distributed as dist

    from gradsync.functional._tally import Row


def opening(group: dist.ProcessGroup | None, loop: str, *, held: int, left: int | None) -> dict[str, Any]:
    """What a rank says as a loop begins, for `Notice`: what it holds, how many items are to come, and where it listens.

    Without a group it does not listen.
    """
    ear = None if group is None or group.size() == 1 else listener(group, loop)
    return {"held": held, "left": left, "token": token_hex(8), "inbox": ear and ear.inbox}


class Notice:
    """Of the windows that one loop synchronises, from which one on they are told about."""

    __slots__ = ("_group", "_heard", "_inboxes", "_plan", "_since", "_taken", "_token", "_turn", "_what")

    def __init__(
        self, group: dist.ProcessGroup | None = None, said: Sequence[Mapping[str, Any]] = (), loop: str = ""
    ) -> None:
        """`said` are the openings of all ranks of `group`; without a group, all windows are told about."""
        self._inboxes = [one["inbox"] for one in said]
        ear = None if group is None or None in self._inboxes else listener(group, loop)
        self._group = group
        self._heard = None if ear is None else ear.heard
        self._since = 0 if ear is None else None  # the first synchronisation that is told about, as far as known
        self._token = said[0]["token"] if said else ""
        self._plan = Plan.of([one["held"] for one in said], [one["left"] for one in said])
        self._what = f"the first window of {loop} that is not as planned on every rank"
        self._turn = 0
        self._taken = 0  # micro-batches that full windows have had in these turns

    @property
    def rides(self) -> bool:
        """Whether the coming synchronisation takes a table along: the same answer on every rank."""
        return self._heard is None or (self._since is not None and self._since < self._turn)

    def announce(self, row: Row, size: int) -> None:
        """Before a window of `size` synchronises: if this rank's `row` is not as planned, make sure that all know."""
        group = self._group
        if group is None or self._since is not None:
            return
        if self._plan.expects(row, group.rank(), self._taken, size):
            return

        def talk() -> None:
            store: Any = group.get_group_store()
            if store.add(turn_to_write(self._token), 1) == 1:  # else another rank is about to say the same
                for inbox in self._inboxes:
                    write(store, inbox, self._token, self._turn)
            wait_for(store, [receipt(inbox, self._token) for inbox in self._inboxes], group, self._what)

        at_the_store(group, self._what, talk)

    def passed(self, size: int) -> bool:
        """One more synchronisation, of a window of `size`, has ended; whether its table is to be told now."""
        turn, self._turn = self._turn, self._turn + 1
        self._taken += size
        if self._heard is None:
            return False
        if self._since is None:
            self._since = self._heard.get(self._token)
        return self._since == turn

    def planned(self, size: int) -> list[Row] | None:
        """What all ranks brought to the window of `size` that has ended last, if none has told; None: full ones."""
        return self._plan.rows(self._taken - size, size)
