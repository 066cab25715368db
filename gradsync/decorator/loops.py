"""`Loops`: the running loops over a function's `.over`. Finds the loop of a call, and items that were read ahead."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from threading import get_ident
from typing import NamedTuple

from gradsync._errors import GradSyncError
from gradsync.functional import Loop


class Running(NamedTuple):
    """A running loop. `position` is the function's place among nested `.over`s."""

    loop: Loop
    position: int


class Loops:
    """The running loops of one function and instance, each in its thread."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._running: dict[int, Running] = {}  # by thread
        self._read_ahead: dict[int, Loop] = {}  # by thread: loops that ended with items without a call

    def __bool__(self) -> bool:
        return bool(self._running or self._read_ahead)

    @contextmanager
    def running(self, loop: Loop, position: int) -> Iterator[None]:
        """Calls inside belong to `loop`."""
        before, mine = self._running.get(loop.thread), Running(loop, position)
        if before is not None:
            before.loop.is_superseded = True
        self._running[loop.thread] = mine
        self._read_ahead.pop(loop.thread, None)
        try:
            yield
        finally:
            if self._running.get(loop.thread) is mine:
                del self._running[loop.thread]

    def note_idle(self, loop: Loop) -> None:
        """The data of `loop` has ended. If it had items without a call, later calls may be meant for those."""
        if loop.data.num_idle:
            if not loop.data.num_calls:
                loop.called_from = _call_stack()
            self._read_ahead[loop.thread] = loop

    def forget_read_ahead(self) -> None:
        """Calls from now on are not for items that were read ahead."""
        self._read_ahead.pop(get_ident(), None)

    def of_call(self) -> Running | None:
        """The loop of a call. Raises if the item of the call was read ahead."""
        thread = get_ident()
        running = self._running.get(thread)
        if running is not None:
            if running.loop.data.num_idle:
                running.loop.called_from = _call_stack()
            return running
        # Items are read ahead by another thread, or by the code that goes on calling after its data has ended.
        ahead = next((one.loop for one in [*self._running.values()] if not one.loop.data.num_calls), None)
        ended = self._read_ahead.get(thread)
        if ahead is None and ended is not None and _goes_on(ended):
            ahead = ended
        if ahead is not None:
            raise GradSyncError(
                f"Each item of {ahead.name} must have its call before the next item is drawn, but items were drawn "
                "ahead of the calls: the data ended with calls still to come. Put what reads ahead inside: "
                f"{ahead.name}(prefetch(loader)), and neither list({ahead.name}(loader)) nor "
                f"prefetch({ahead.name}(loader)). Call in the thread that draws the items. If all items were left out "
                f"on purpose, call {self._name}.flush() or {self._name}.reset() before you go on."
            )
        return None


def _goes_on(loop: Loop) -> bool:
    """Whether this call comes from the same place as the calls of a loop that has ended."""
    now, then = _call_stack(), loop.called_from
    if loop.data.num_calls:
        return now == then
    # All items were drawn without a call: this is the first call, in the function that drew them.
    return loop.data.num_items > 1 and any(
        frame[0] == now[0][0] and then[place + 1 :] == now[1:] for place, frame in enumerate(then)
    )


def _call_stack() -> tuple[tuple[int, int], ...]:
    """The frames above a call, outside of this package: code objects and places in them."""
    stack: list[tuple[int, int]] = []
    frame = sys._getframe(1)
    while frame is not None:
        if stack or not frame.f_globals.get("__name__", "").startswith("gradsync."):
            stack.append((id(frame.f_code), frame.f_lasti))
        frame = frame.f_back  # type: ignore[assignment]
    return tuple(stack)
