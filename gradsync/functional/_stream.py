"""An iterable, seen one item ahead."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

T = TypeVar("T")


def lookahead(iterable: Iterable[T]) -> Iterator[tuple[T, bool]]:
    """Each item, and whether it is the last.

    >>> list(lookahead("ab"))
    [('a', False), ('b', True)]
    """
    iterator = iter(iterable)
    try:
        item = next(iterator)
    except StopIteration:
        return
    for following in iterator:
        yield item, False
        item = following
    yield item, True


def length(iterable: object) -> int | None:
    """Its length where it has one."""
    try:
        return len(iterable)  # type: ignore[arg-type]
    except TypeError:
        return None
