"""An iterable, and which of its items is the last."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from gradsync._errors import GradSyncError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

T = TypeVar("T")


def with_last(iterable: Iterable[T], name: str = "a loop") -> Iterator[tuple[T, bool]]:
    """Each item, and whether it is the last.

    Where the length is known, nothing is drawn ahead; where it is not, one item is.

    >>> list(with_last("ab"))
    [('a', False), ('b', True)]
    >>> list(with_last(iter("ab")))
    [('a', False), ('b', True)]
    """
    known = length(iterable)
    if known is None:
        yield from _one_ahead(iterable)
        return
    for number, item in enumerate(iterable, start=1):
        if number > known:
            raise GradSyncError(
                f"An iterable in {name} must yield no more items than its length says, but this one of length {known} "
                "went on. Mend its __len__, or pass iter(...) of it, whose length is not asked for."
            )
        yield item, number == known


def length(iterable: object) -> int | None:
    """Its length where it has one."""
    try:
        return len(iterable)  # type: ignore[arg-type]
    except TypeError:
        return None


def _one_ahead(iterable: Iterable[T]) -> Iterator[tuple[T, bool]]:
    iterator = iter(iterable)
    try:
        item = next(iterator)
    except StopIteration:
        return
    for following in iterator:
        yield item, False
        item = following
    yield item, True
