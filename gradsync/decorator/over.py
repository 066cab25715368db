"""`.over`: the iterable again, in a loop that knows the last item and goes on with the other ranks after it."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from types import CodeType
from typing import TYPE_CHECKING, Generic, TypeVar

from gradsync._errors import GradSyncError
from gradsync._frames import drawn_by, is_left_on_purpose
from gradsync.decorator.calls import Calls
from gradsync.decorator.micro_batches import MicroBatches
from gradsync.functional import Loop, Run, StandIn, length

T = TypeVar("T")


def over(iterable: Iterable[T], calls: Calls, instance: object) -> Over[T]:
    """The iterable again, sized if it was."""
    return (Over if length(iterable) is None else SizedOver)(iterable, calls, instance)


class Over(Generic[T]):
    """An iterable in the `.over` of a function, or of several."""

    if TYPE_CHECKING:  # no type tells whether an iterable is sized

        def __len__(self) -> int: ...

    def __init__(self, iterable: Iterable[T], calls: Calls, instance: object) -> None:
        # Nested `.over`s share one loop: with two, the outer loop would end the inner loop too soon.
        self._iterable: Iterable[T] = iterable
        self._decorated: list[tuple[Calls, object]] = [(calls, instance)]  # an instance lives as long as its loop
        if isinstance(iterable, Over):
            self._iterable, self._decorated = iterable._iterable, [*iterable._decorated, (calls, instance)]

    def __iter__(self) -> Iterator[T]:
        decorated = [*self._decorated]
        all_calls = [calls for calls, _ in decorated]
        name = f"{all_calls[0].name}.over"
        loop = Loop(name, length(self._iterable), lambda: _runs(decorated))
        with ExitStack() as stack:
            # The loop may be referenced longer than its data and its instances are needed.
            stack.callback(loop.end)
            stack.callback(decorated.clear)
            for position, calls in enumerate(all_calls):
                stack.enter_context(calls.loops.running(loop, position))
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
                    _settle(all_calls)
                else:
                    for micro_batches in _of_this_thread(all_calls):
                        micro_batches.updater.go_back()
                raise
            for run, place in _rest(loop, all_calls):
                micro_batches = next(one for calls in all_calls for one in calls.every if one.run is run)
                micro_batches.take_part(place)
            _settle(all_calls)
        for calls in all_calls:
            calls.loops.note_idle(loop)


class SizedOver(Over[T]):
    """The same, with a length."""

    def __len__(self) -> int:
        return len(self._iterable)  # type: ignore[arg-type]


def _runs(decorated: Sequence[tuple[Calls, object]]) -> list[Run]:
    return [run for place, (calls, instance) in enumerate(decorated) for run in calls.runs(instance, place)]


def _insist_on_latest(loop: Loop) -> None:
    """Raise if another loop of the same function has begun meanwhile."""
    if loop.is_superseded:
        raise GradSyncError(
            f"One loop of {loop.name} runs at a time, but another one began before this one had ended, and the calls "
            f"were counted for the newer one. Put several iterables into one: {loop.name}(zip(a, b)), and end a loop "
            "before the next."
        )


def _rest(loop: Loop, all_calls: Sequence[Calls]) -> Iterator[StandIn]:
    """The places after this rank's data has ended. What other ranks land before a boundary lands before it here."""
    rest = loop.rest()
    while True:
        for micro_batches in _of_this_thread(all_calls):
            micro_batches.land_before_boundary()
        turn = next(rest, None)
        if turn is None:
            return
        yield turn


def _settle(all_calls: Sequence[Calls]) -> None:
    for calls in all_calls:
        calls.settle()


def _of_this_thread(all_calls: Sequence[Calls]) -> list[MicroBatches]:
    return [micro_batches for calls in all_calls for micro_batches in calls.of_this_thread()]


def _warn_if_open(loop: Loop) -> None:
    """Warn if a loop is left with a window open."""
    opened = [run for run in loop.called if run.index]
    if opened:
        name = loop.name.removesuffix(".over")
        for run in opened:
            run.warned_of = run.window
        warnings.warn(
            f"The loop over {loop.name} was left with a window open: {opened[0].index} micro-batches are accumulated. "
            f"Call {name}.flush() to use them, on all ranks together, or {name}.reset() to drop them.",
            RuntimeWarning,
            stacklevel=3,
        )
