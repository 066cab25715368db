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
    from gradsync.decorator.windows import Windows
    from gradsync.functional import Run, StandIn

T = TypeVar("T")


def over(iterable: Iterable[T], registry: Registry, instance: object) -> Over[T]:
    """The iterable again, sized if it was."""
    return (Over if length(iterable) is None else SizedOver)(iterable, registry, instance)


class Over(Generic[T]):
    """An iterable in the `.over` of a function, or of several."""

    if TYPE_CHECKING:  # no type tells whether an iterable is sized

        def __len__(self) -> int: ...

    def __init__(self, iterable: Iterable[T], registry: Registry, instance: object) -> None:
        # Nested `.over`s share one loop: with two, the outer loop would end the inner loop too soon.
        self._iterable: Iterable[T] = iterable
        self._decorated: list[tuple[Registry, object]] = [(registry, instance)]  # an instance lives as long as its loop
        if isinstance(iterable, Over):
            self._iterable, self._decorated = iterable._iterable, [*iterable._decorated, (registry, instance)]

    def __iter__(self) -> Iterator[T]:
        decorated = [*self._decorated]
        registries = [registry for registry, _ in decorated]
        name = f"{registries[0].name}.over"
        loop = Loop(name, length(self._iterable), lambda: _runs(decorated))
        with ExitStack() as stack:
            # The loop may be referenced longer than its data and its instances are needed.
            stack.callback(loop.end)
            stack.callback(decorated.clear)
            for position, registry in enumerate(registries):
                stack.enter_context(registry.loops.running(loop, position))
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
                    _settle(registries)
                else:
                    for windows in _of_this_thread(registries):
                        windows.updater.go_back()
                raise
            for run, place in _rest(loop, registries):
                windows = next(one for registry in registries for one in registry.every if one.run is run)
                windows.take_part(place)
            _settle(registries)
        for registry in registries:
            registry.loops.note_idle(loop)


class SizedOver(Over[T]):
    """The same, with a length."""

    def __len__(self) -> int:
        return len(self._iterable)  # type: ignore[arg-type]


def _runs(decorated: Sequence[tuple[Registry, object]]) -> list[Run]:
    return [run for place, (registry, instance) in enumerate(decorated) for run in registry.runs(instance, place)]


def _insist_on_latest(loop: Loop) -> None:
    """Raise if another loop of the same function has begun meanwhile."""
    if loop.is_superseded:
        raise GradSyncError(
            f"One loop of {loop.name} runs at a time, but another one began before this one had ended, and the calls "
            f"were taken for its. Put several iterables into one: {loop.name}(zip(a, b)), and end a loop before the "
            "next."
        )


def _rest(loop: Loop, registries: Sequence[Registry]) -> Iterator[StandIn]:
    """The places after this rank's data has ended. What other ranks land before a boundary lands before it here."""
    rest = loop.rest()
    while True:
        for windows in _of_this_thread(registries):
            windows.land_before_boundary()
        turn = next(rest, None)
        if turn is None:
            return
        yield turn


def _settle(registries: Sequence[Registry]) -> None:
    for registry in registries:
        registry.settle()


def _of_this_thread(registries: Sequence[Registry]) -> list[Windows]:
    return [windows for registry in registries for windows in registry.of_this_thread()]


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
