"""The items of a loop: how many are known to come after each, and how many calls each has had."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import TypeVar

from gradsync._errors import GradSyncError
from gradsync.functional._window.table import PERHAPS, UNKNOWN

T = TypeVar("T")


def with_last(iterable: Iterable[T], name: str = "a loop") -> Iterator[tuple[T, bool]]:
    """Each item, and whether it is the last.

    Where the length is known, nothing is drawn ahead; where it is not, one item is.

    >>> list(with_last("ab"))
    [('a', False), ('b', True)]
    >>> list(with_last(iter("ab")))
    [('a', False), ('b', True)]
    """
    data = Data(length(iterable))
    for item in data.items(iterable, name, lambda: 1):
        yield item, data.is_last


def length(iterable: object) -> int | None:
    """The length of an iterable; None if it has none."""
    try:
        return len(iterable)  # type: ignore[arg-type]
    except TypeError:
        return None


class Data:
    """What a loop knows of its iterable. Calls are counted for each run."""

    def __init__(self, length: int | None) -> None:
        self.length = length
        self.is_as_long = True  # whether all ranks are known to have as many items
        self.num_items = 0
        self.num_calls = 0
        self.num_idle = 0  # items without a call
        self.is_last = False  # whether the current item is the last
        self.has_ended = False
        self.num_known = 0  # how many items are known to come
        self._calls: dict[Hashable, int] = {}  # for the current item
        self._most: dict[Hashable, int] = {}  # the largest number for any item before it

    def items(self, iterable: Iterable[T], name: str, ahead: Callable[[], int]) -> Iterator[T]:
        """The items of an iterable, counted.

        Where the length is known, nothing is drawn ahead; where it is not, `ahead()` items are, asked before each.

        >>> data = Data(None)
        >>> [(item, data.num_known) for item in data.items(iter("abcd"), "a loop", lambda: 2)]
        [('a', 2), ('b', 2), ('c', 1), ('d', 0)]
        """
        if self.length is None:
            drawn: deque[T] = deque()
            for item in iterable:
                drawn.append(item)
                while len(drawn) > ahead():
                    self._begin_item(len(drawn) - 1)
                    yield drawn.popleft()
            while drawn:
                self._begin_item(len(drawn) - 1)
                yield drawn.popleft()
            return
        for item in iterable:
            if self.num_items == self.length:
                raise GradSyncError(
                    f"An iterable in {name} must yield no more items than its length says, but this one of length "
                    f"{self.length} went on. Mend its __len__, or pass iter(...) of it, whose length is not asked for."
                )
            self._begin_item(self.length - self.num_items - 1)
            yield item

    def end(self) -> None:
        """The data has ended, and the last item has had its calls."""
        self._finish_item()
        self.is_last = self.has_ended = True

    def call(self, run: Hashable) -> None:
        """Count a call that begins."""
        self.num_calls += 1
        self._calls[run] = self._calls.get(run, 0) + 1

    def expect_one_call(self, run: Hashable) -> None:
        """Declare that the run is called once for each item."""
        self._most[run] = 1

    def calls_once(self, run: Hashable) -> bool:
        """Whether, so far, the run was called once for an item, and never more often."""
        return self._most.get(run) == 1 and self._calls.get(run, 0) <= 1

    def left(self, run: Hashable) -> float:
        """How many items are still to come, for the table."""
        if self.is_last:
            return 0.0 if self.has_ended or self.calls_once(run) else PERHAPS
        return UNKNOWN if self.length is None else float(self.length - self.num_items)

    def _begin_item(self, num_known: int) -> None:
        self._finish_item()
        self.num_items += 1
        self.num_known, self.is_last = num_known, not num_known

    def _finish_item(self) -> None:
        if not self._calls:
            self.num_idle += self.num_items > 0
            return
        for run, calls in self._calls.items():
            if calls > self._most.get(run, 0):
                self._most[run] = calls
        self._calls.clear()
