"""The items of a loop: how many are known to come after each, and how many calls each has had."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import TypeVar

from gradsync._errors import GradSyncError
from gradsync.functional._window.share import PERHAPS, UNKNOWN

T = TypeVar("T")


def length(iterable: object) -> int | None:
    """The length of an iterable; None if it has none."""
    try:
        return len(iterable)  # type: ignore[arg-type]
    except TypeError:
        return None


class CountedItems:
    """What a loop knows of its iterable. Calls are counted for each run."""

    def __init__(self, length: int | None) -> None:
        self.length = length
        self.num_items = 0
        self.num_calls = 0
        self.num_idle = 0  # items without a call
        self.num_known = UNKNOWN if length is None else length  # items to come behind the current one
        self.has_ended = False
        # Plain dicts: a `Counter` is slower by half a us a call.
        self.most: dict[Hashable, int] = {}  # by run: its largest number of calls for any item before this one
        self._calls: dict[Hashable, int] = {}  # for this one

    def items(self, iterable: Iterable[T], name: str, ahead: Callable[[], int]) -> Iterator[T]:
        """The items of an iterable, counted.

        Where the length is known, nothing is drawn ahead; where it is not, `ahead()` items are, asked before each.

        >>> data = CountedItems(None)
        >>> [(item, data.num_known) for item in data.items(iter("abcd"), "a loop", lambda: 2)]
        [('a', 2), ('b', 2), ('c', 1), ('d', 0)]
        """
        drawn: deque[T] = deque()
        for item in iterable:
            if self.num_items == self.length:
                raise GradSyncError(
                    f"An iterable in {name} must yield no more items than its length says, but this one of length "
                    f"{self.length} went on. Mend its __len__, or pass iter(...) of it, whose length is not asked."
                )
            drawn.append(item)
            while len(drawn) > (ahead() if self.length is None else 0):
                yield self._next_of(drawn)
        while drawn:
            yield self._next_of(drawn)

    def end(self) -> None:
        """The data has ended, and the last item has had its calls."""
        self._finish_item()
        self.num_known, self.has_ended = 0, True

    def call(self, run: Hashable) -> None:
        """Count a call that begins."""
        self.num_calls += 1
        self._calls[run] = self._calls.get(run, 0) + 1

    def calls_once(self, run: Hashable) -> bool:
        """Whether the run was called once for an earlier item, and never twice for one."""
        return self.most.get(run) == 1 and self._calls.get(run, 0) <= 1

    def left(self, run: Hashable) -> float:
        """How many items are still to come, for the table."""
        if self.num_known:
            return UNKNOWN if self.length is None else float(self.num_known)
        return 0.0 if self.has_ended or self.calls_once(run) else PERHAPS

    def _next_of(self, drawn: deque[T]) -> T:
        """The next item, which begins."""
        self._finish_item()
        self.num_items += 1
        item = drawn.popleft()
        self.num_known = len(drawn) if self.length is None else self.length - self.num_items
        return item

    def _finish_item(self) -> None:
        if not self._calls:
            self.num_idle += self.num_items > 0
            return
        for run, calls in self._calls.items():
            if calls > self.most.get(run, 0):
                self.most[run] = calls
        self._calls.clear()


def with_last(iterable: Iterable[T], name: str = "a loop") -> Iterator[tuple[T, bool]]:
    """Each item, and whether it is the last; for loops that somebody builds by hand.

    Where the length is known, nothing is drawn ahead; where it is not, one item is.

    >>> list(with_last("ab"))
    [('a', False), ('b', True)]
    >>> list(with_last(iter("ab")))
    [('a', False), ('b', True)]
    """
    data = CountedItems(length(iterable))
    for item in data.items(iterable, name, lambda: 1):
        yield item, not data.num_known
