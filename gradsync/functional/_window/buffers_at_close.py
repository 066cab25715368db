"""Buffers as a window closes: all ranks get those of the lowest rank that had a micro-batch, or was expected to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

from gradsync.functional._window.exchange import Exchange
from gradsync.functional._window.share import Share
from gradsync.functional._window.window import Window

Hear: TypeAlias = Callable[[], Sequence[Share]]


class BuffersAtClose:
    """Makes the buffers equal on all ranks, once. `hear()` waits for the window's table, if one was sent."""

    def __init__(self, window: Window, exchange: Exchange) -> None:
        self._window = window
        self._due = exchange.due()  # which ranks were expected to have one, by rank; empty: every rank
        self._all_are_due = not self._due and window.heard is None and not exchange.has_an_end
        self._arrivals: Sequence[Callable[[], None]] | None = None  # waits for buffers that have left already

    def send(self, hear: Hear) -> None:
        """Send the buffers before the backward. This waits for the table only if rank 0 may have no micro-batch."""
        rank = 0 if self._all_are_due or any(self._due[:1]) else self._source(hear)
        self._arrivals = [engine.send_buffers(rank) for engine in self._window.active]

    def share(self, hear: Hear) -> None:
        """Make the buffers equal after the backward, or wait for those that were sent."""
        for arrive in self._arrivals or ():
            arrive()
        if self._arrivals is None:
            rank = self._source(hear)
            for engine in self._window.active:
                engine.share_buffers(rank)

    def _source(self, hear: Hear) -> int:
        """The rank whose buffers all get."""
        due = self._due
        there = (r for r, share in enumerate(hear()) if share.num_calls or (r < len(due) and due[r]))
        return next(there, 0)
