"""`.over`: the iterable again, in a loop that knows the last item and goes on with the other ranks after it."""

from __future__ import annotations

import sys
import warnings
from contextlib import ExitStack
from typing import TYPE_CHECKING, Generic, TypeVar

from gradsync._errors import GradSyncError
from gradsync._frames import drawn_by, is_left_on_purpose
from gradsync.functional import Loop, length

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from types import CodeType

    from gradsync.decorator.registry import Registry
    from gradsync.functional import Run, StandIn

T = TypeVar("T")
_Decorated = tuple["Registry", object]  # a function's windows, and its instance if it is a method


def over(iterable: Iterable[T], registry: Registry, instance: object) -> Over[T]:
    """The iterable again, sized if it was."""
    return (Over if length(iterable) is None else SizedOver)(iterable, registry, instance)


class Over(Generic[T]):
    """An iterable in the `.over` of a function, or of several."""

    def __init__(self, iterable: Iterable[T], registry: Registry, instance: object) -> None:
        # Nested `.over`s share one loop: with two, the outer loop would end the inner loop too soon.
        self._iterable: Iterable[T] = iterable
        self._decorated: list[_Decorated] = [(registry, instance)]
        if isinstance(iterable, Over):
            self._iterable, self._decorated = iterable._iterable, [*iterable._decorated, (registry, instance)]

    def __iter__(self) -> Iterator[T]:
        decorated = self._decorated
        name = f"{decorated[0][0].name}.over"
        loop = Loop(name, length(self._iterable), lambda: _runs(decorated))
        with ExitStack() as stack:
            stack.callback(loop.kept.clear)  # the loop may be referenced longer than its data is needed
            for position, (registry, instance) in enumerate(decorated):
                stack.enter_context(registry.looping(loop, instance, position))
            drawn: Sequence[CodeType] = ()
            try:
                for item in loop.items(self._iterable):
                    drawn = drawn_by(sys._getframe(0).f_back)
                    yield item
                    _insist_on_latest(loop)
            except GeneratorExit:
                if loop.is_superseded:  # what is open, and what travels, is that of a later loop
                    raise
                if is_left_on_purpose(sys._getframe(0).f_back, drawn):
                    _warn_if_open(loop)
                    _settle(decorated)
                else:
                    _go_back(decorated)
                raise
            for run, place in _rest(loop, decorated):
                windows = next(one for registry, _ in decorated if (one := registry.windows_of(run)) is not None)
                windows.take_part(place)
            _settle(decorated)
        for registry, instance in decorated:
            registry.note_idle(loop, instance)


class SizedOver(Over[T]):
    """The same, with a length."""

    def __len__(self) -> int:
        return len(self._iterable)  # type: ignore[arg-type]


def _runs(decorated: Sequence[_Decorated]) -> list[Run]:
    return [run for position, (registry, instance) in enumerate(decorated) for run in registry.runs(instance, position)]


def _insist_on_latest(loop: Loop) -> None:
    """Raise if another loop of the same function has begun meanwhile."""
    if loop.is_superseded:
        raise GradSyncError(
            f"One loop of {loop.name} runs at a time, but another one began before this one had ended, and the calls "
            f"were taken for its. Put several iterables into one: {loop.name}(zip(a, b)), and end a loop before the "
            "next."
        )


def _rest(loop: Loop, decorated: Sequence[_Decorated]) -> Iterator[StandIn]:
    """The places after this rank's data has ended. What other ranks land before a boundary lands before it here."""
    rest = loop.rest()
    while True:
        for registry, instance in decorated:
            registry.land_before_boundary(instance)
        turn = next(rest, None)
        if turn is None:
            return
        yield turn


def _settle(decorated: Sequence[_Decorated]) -> None:
    """Wait for what travels."""
    for registry, instance in decorated:
        registry.settle(instance)


def _go_back(decorated: Sequence[_Decorated]) -> None:
    """After an exception, which waits for nothing."""
    for registry, instance in decorated:
        registry.go_back(instance)


def _warn_if_open(loop: Loop) -> None:
    """Warn if a loop is left with a window open."""
    opened = [run for run in loop.called if run.index]
    if opened:
        name = loop.name.removesuffix(".over")
        for run in opened:
            run.told = run.window
        warnings.warn(
            f"The loop over {loop.name} was left with a window open: {opened[0].index} micro-batches are accumulated. "
            f"Call {name}.flush() to use them, on all ranks together, or {name}.reset() to drop them.",
            RuntimeWarning,
            stacklevel=3,
        )
