"""The loops over a function's `.over` that run: to which a call belongs, and whether its item was read ahead."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from threading import get_ident
from typing import TYPE_CHECKING, NamedTuple

from gradsync._errors import GradSyncError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from gradsync.functional import Loop

Key = int | None  # id of the instance, for methods


class Running(NamedTuple):
    """A loop that runs, and the function's place among those that are nested in it."""

    loop: Loop
    key: Key
    position: int


class Loops:
    """Those of one function, by instance and thread."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._running: list[Running] = []
        self._read_ahead: dict[tuple[int, Key], Loop] = {}  # loops that ended with items that no call had come for

    def __bool__(self) -> bool:
        return bool(self._running or self._read_ahead)

    @contextmanager
    def running(self, loop: Loop, key: Key, position: int) -> Iterator[None]:
        """The calls inside know of `loop`."""
        for other in self._running:
            if other.key == key and other.loop.thread == loop.thread:
                other.loop.is_superseded = True
        self._running = [one for one in self._running if not one.loop.is_superseded]
        self._running.append(Running(loop, key, position))
        self._read_ahead.pop((loop.thread, key), None)
        try:
            yield
        finally:
            self._running = [one for one in self._running if one.loop is not loop]

    def note_idle(self, loop: Loop, key: Key) -> None:
        """The data of `loop` has ended. Where items were drawn without a call, calls after it may be meant for them."""
        if loop.num_idle:
            if not loop.num_calls:
                loop.called_from = _call_stack()
            self._read_ahead[loop.thread, key] = loop

    def forget_read_ahead(self, key: Key) -> None:
        """Calls that come now are meant for themselves."""
        self._read_ahead.pop((get_ident(), key), None)

    def of_call(self, key: Key) -> Running | None:
        """The innermost loop that a call comes in. Raises for a call whose item was drawn ahead of it."""
        thread = get_ident()
        for running in reversed(self._running):
            if running.key == key and running.loop.thread == thread:
                if running.loop.num_idle:
                    running.loop.called_from = _call_stack()
                return running
        elsewhere = next((one.loop for one in self._running if one.key == key and not one.loop.num_calls), None)
        ended = self._read_ahead.get((thread, key))
        # A body that goes on after its data has ended had items that were drawn ahead; other calls come from elsewhere.
        ahead = ended if elsewhere is None and ended is not None and _goes_on(ended) else elsewhere
        if ahead is not None:
            raise GradSyncError(
                f"Each item of {ahead.name} must have its call before the next item is drawn, but items were drawn "
                "ahead of the calls: the data ended with calls still to come. Put what reads ahead inside: "
                f"{ahead.name}(prefetch(loader)), and neither list({ahead.name}(loader)) nor "
                f"prefetch({ahead.name}(loader)). If all items were left out on purpose, call {self._name}.flush() or "
                f"{self._name}.reset() before you go on."
            )
        return None


def _goes_on(loop: Loop) -> bool:
    """Whether the call that comes now is one more of those in a loop that has ended."""
    now, then = _call_stack(), loop.called_from
    if loop.num_calls:
        return now == then
    # All items were drawn, and no call came: in the function that drew them, this is the first.
    drawn = then if isinstance(then, tuple) else ()
    return loop.num_items > 1 and any(
        frame[0] == now[0][0] and drawn[place + 1 :] == now[1:] for place, frame in enumerate(drawn)
    )


def _call_stack() -> tuple[tuple[int, int], ...]:
    """Where a call comes from, outside of this package: code and place in it, all the way up."""
    stack: list[tuple[int, int]] = []
    frame = sys._getframe(1)
    while frame is not None:
        if stack or not frame.f_globals.get("__name__", "").startswith("gradsync."):
            stack.append((id(frame.f_code), frame.f_lasti))
        frame = frame.f_back  # type: ignore[assignment]
    return tuple(stack)
