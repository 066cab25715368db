"""The items of an iterable, with how many are known to come after each."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, TypeVar

from gradsync._errors import GradSyncError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

T = TypeVar("T")


def with_last(iterable: Iterable[T], name: str = "a loop") -> Iterator[tuple[T, bool]]:
    """Each item, and whether it is the last.

    Where the length is known, nothing is drawn ahead; where it is not, one item is.

    >>> list(with_last("ab"))
    [('a', False), ('b', True)]
    >>> list(with_last(iter("ab")))
    [('a', False), ('b', True)]
    """
    for item, known in with_known(iterable, name, lambda: 1, length(iterable)):
        yield item, not known


def with_known(
    iterable: Iterable[T], name: str, ahead: Callable[[], int], known: int | None = None
) -> Iterator[tuple[T, int]]:
    """Each item, and how many more are known to come.

    Where the length is `known`, nothing is drawn ahead; where it is not, `ahead()` items are, asked before each.

    >>> list(with_known(iter("abcd"), "a loop", lambda: 2))
    [('a', 2), ('b', 2), ('c', 1), ('d', 0)]
    """
    if known is None:
        drawn: deque[T] = deque()
        for item in iterable:
            drawn.append(item)
            while len(drawn) > ahead():
                yield drawn.popleft(), len(drawn)
        while drawn:
            yield drawn.popleft(), len(drawn)
        return
    for number, item in enumerate(iterable, start=1):
        if number > known:
            raise GradSyncError(
                f"An iterable in {name} must yield no more items than its length says, but this one of length {known} "
                "went on. Mend its __len__, or pass iter(...) of it, whose length is not asked for."
            )
        yield item, known - number


def length(iterable: object) -> int | None:
    """The length of an iterable; None if it has none."""
    try:
        return len(iterable)  # type: ignore[arg-type]
    except TypeError:
        return None
