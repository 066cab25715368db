"""`with_last`, for loops that somebody builds by hand: nothing else in here uses it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeVar

from gradsync.functional._loop.counted_items import CountedItems, length

T = TypeVar("T")


def with_last(iterable: Iterable[T], name: str = "a loop") -> Iterator[tuple[T, bool]]:
    """Each item, and whether it is the last.

    Where the length is known, nothing is drawn ahead; where it is not, one item is.

    >>> list(with_last("ab"))
    [('a', False), ('b', True)]
    >>> list(with_last(iter("ab")))
    [('a', False), ('b', True)]
    """
    data = CountedItems(length(iterable))
    for item in data.items(iterable, name, lambda: 1):
        yield item, not data.num_known
