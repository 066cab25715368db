"""Buffers as a window closes: all ranks get those of the lowest rank that had a micro-batch, or was expected to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

from gradsync.engines import Engine
from gradsync.functional._window.share import Share

Hear: TypeAlias = Callable[[], Sequence[Share]]


class BuffersAtClose:
    """Makes the buffers of engines equal on all ranks, once. `hear()` waits for the window's table, if one was sent."""

    def __init__(self, engines: Sequence[Engine], due: Sequence[bool]) -> None:
        """`due` says of each rank whether it was expected to have a micro-batch."""
        self._engines = engines
        self._due = due
        self._arrivals: Sequence[Callable[[], None]] | None = None  # waits for buffers that have left already

    def send(self, hear: Hear) -> None:
        """Send the buffers before the backward. This waits for the table only if rank 0 may have no micro-batch."""
        rank = 0 if self._due[0] else self._source(hear)
        self._arrivals = [engine.send_buffers(rank) for engine in self._engines]

    def share(self, hear: Hear) -> None:
        """Make the buffers equal after the backward, or wait for those that were sent."""
        for arrive in self._arrivals or ():
            arrive()
        if self._arrivals is None:
            rank = self._source(hear)
            for engine in self._engines:
                engine.share_buffers(rank)

    def _source(self, hear: Hear) -> int:
        """The rank whose buffers all get."""
        there = (rank for rank, share in enumerate(hear()) if share.num_calls or self._due[rank])
        return next(there, 0)
