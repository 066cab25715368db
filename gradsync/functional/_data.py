"""How far this rank's data is in a loop, and which calls its items have had."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, TypeVar

from gradsync.functional._stream import with_known

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Iterator

T = TypeVar("T")

_PERHAPS = 0.5  # an item, in place of items left


class Data:
    """What a loop knows of its iterable. Calls are counted by the run that they are of."""

    def __init__(self, length: int | None) -> None:
        self.length = length
        self.num_items = 0
        self.num_calls = 0
        self.num_idle = 0  # items that no call came for
        self.is_last = False  # whether the current item is the last
        self.has_ended = False
        self._drawn: int | None = None  # items that were drawn ahead, where the loop draws them itself
        self._calls: dict[Hashable, int] = {}  # for the current item,
        self._most: dict[Hashable, int] = {}  # and the most for one before it

    def items(self, iterable: Iterable[T], name: str, ahead: Callable[[], int]) -> Iterator[T]:
        """The items of an iterable, each one handed out; where its length is not known, so many are drawn ahead."""
        for item, drawn in with_known(iterable, name, ahead, self.length):
            self._drawn = drawn
            self.draw(last=not drawn)
            yield item

    def draw(self, *, last: bool) -> None:
        """An item is handed out."""
        self._finish_item()
        self.num_items += 1
        self.is_last = last

    def end(self) -> None:
        """All items have been handed out, and had their calls."""
        self._finish_item()
        self.is_last = self.has_ended = True

    def call(self, run: Hashable) -> None:
        """A call begins."""
        self.num_calls += 1
        self._calls[run] = self._calls.get(run, 0) + 1

    def expect_one_call(self, run: Hashable) -> None:
        """It is known to be called once an item."""
        self._most[run] = 1

    def calls_once(self, run: Hashable) -> bool:
        """Whether the loop has been seen to call it once an item, and never more often."""
        return self._most.get(run) == 1 and self._calls.get(run, 0) <= 1

    def is_in_last_call(self, run: Hashable) -> bool:
        """Whether the call that has begun is the last, as far as this rank's data goes."""
        return self.is_last and self.calls_once(run) and self._calls[run] == 1

    def left(self, run: Hashable) -> float:
        """How many items are still to come; inf where that is not known, and a part of one if a call may come."""
        if self.is_last:
            return 0.0 if self.has_ended or self.calls_once(run) else _PERHAPS
        return math.inf if self.length is None else float(max(0, self.length - self.num_items))

    def foresees(self, run: Hashable) -> bool:
        """Whether each item has had one call, of `run`, and items to come are known: so are calls to come."""
        looked = self.length is not None or self._drawn is not None
        return looked and self.calls_once(run) and not self.num_idle

    @property
    def num_known(self) -> int:
        """How many items are known to come."""
        return self._drawn or 0 if self.length is None else self.length - self.num_items

    def _finish_item(self) -> None:
        self.num_idle += not self._calls and self.num_items > 0
        for run, calls in self._calls.items():
            self._most[run] = max(self._most.get(run, 0), calls)
        self._calls.clear()
