"""`.over`: the iterable again, in a loop that knows the last item and goes on with the other ranks after it.

Also: which loop a call belongs to, and the error for items that were read ahead of their calls.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable, Iterator, Sequence
from threading import get_ident
from types import CodeType
from typing import TYPE_CHECKING, Generic, TypeVar

from gradsync._errors import GradSyncError
from gradsync._frames import drawn_by, is_left_on_purpose
from gradsync.decorator.call_runner import CallRunner
from gradsync.decorator.windows_of_function import WindowsOfFunction
from gradsync.functional import Loop, length

T = TypeVar("T")


class Over(Generic[T]):
    """An iterable in the `.over` of a function, or of several."""

    if TYPE_CHECKING:  # no type tells whether an iterable is sized

        def __len__(self) -> int: ...

    def __init__(self, iterable: Iterable[T], windows: WindowsOfFunction) -> None:
        # Nested `.over`s share one loop: with two, the outer loop would end the inner loop too soon.
        inner = iterable if isinstance(iterable, Over) else None
        self._iterable: Iterable[T] = iterable if inner is None else inner._iterable
        self._decorated: list[WindowsOfFunction] = [windows] if inner is None else [*inner._decorated, windows]
        self._kept_alive = [windows.instance() for windows in self._decorated]  # they live as long as their loop

    def __iter__(self) -> Iterator[T]:
        all_windows, in_loop = self._decorated, [*self._decorated]
        loop = Loop(
            f"{all_windows[0].name}.over",
            length(self._iterable),
            lambda: [run for windows in in_loop for run in windows.runs()],
        )
        for position, windows in enumerate(all_windows):
            _begin(windows, loop, position)
        drawn: Sequence[CodeType] = ()
        try:
            for item in loop.items(self._iterable):
                drawn = drawn_by(sys._getframe(0).f_back)
                yield item
                _insist_on_latest(loop)
            _take_part_in_the_rest(loop, all_windows)
        except GeneratorExit:
            if not loop.is_superseded:  # else what is open, and what travels, is that of a later loop
                _leave(loop, all_windows, drawn)
            raise
        finally:
            for windows in all_windows:
                if windows.loops.get(loop.thread) is loop:
                    del windows.loops[loop.thread]
            # The loop may be referenced longer than its data and its windows are needed.
            in_loop.clear()
            loop.end()
        for windows in all_windows if loop.data.num_idle else ():  # later calls may be meant for items without a call
            windows.read_ahead[loop.thread] = loop
            if not loop.data.num_calls:
                loop.called_from = _call_stack()


class SizedOver(Over[T]):
    """The same, with a length."""

    def __len__(self) -> int:
        return len(self._iterable)  # type: ignore[arg-type]


def _insist_on_latest(loop: Loop) -> None:
    """Raise if another loop of the same function has begun meanwhile."""
    if loop.is_superseded:
        raise GradSyncError(
            f"One loop of {loop.name} runs at a time, but another one began before this one had ended, and the calls "
            f"were counted for the newer one. Put several iterables into one: {loop.name}(zip(a, b)), and end a loop "
            "before the next."
        )


def _leave(loop: Loop, all_windows: Sequence[WindowsOfFunction], drawn: Sequence[CodeType]) -> None:
    """A loop is left early. On purpose: land what travels, and warn if a window is open. By an exception: go back."""
    if not is_left_on_purpose(sys._getframe(1).f_back, drawn):  # frame 1 is that of the loop
        for runner in _of_this_thread(all_windows):
            runner.updater.go_back()
        return
    opened = [run for run in loop.called if run.index]
    if opened:
        name = loop.name.removesuffix(".over")
        for run in opened:
            run.open_window.is_warned_of = True
        warnings.warn(
            f"The loop over {loop.name} was left with a window open: {opened[0].index} micro-batches are accumulated. "
            f"Call {name}.flush() to use them, on all ranks together, or {name}.reset() to drop them.",
            RuntimeWarning,
            stacklevel=3,
        )
    for runner in _of_this_thread(all_windows):
        error = runner.updater.settle_quietly()  # an error here would be printed, and passed over
        if error is not None:
            warnings.warn(
                f"The last update of {runner.run.name} failed as the loop was left: {error!r}. Its next call, flush() "
                "or settle() raises that.",
                RuntimeWarning,
                stacklevel=3,
            )


def _take_part_in_the_rest(loop: Loop, all_windows: Sequence[WindowsOfFunction]) -> None:
    """After this rank's data has ended."""
    loop.end_data()  # without a call, the ranks meet here: those that have items land after they have met
    for runner in _of_this_thread(all_windows):
        runner.land_before_boundary()
    for run, place in loop.rest():
        next(one for windows in all_windows for one in windows.every if one.run is run).take_part(place)
    for windows in all_windows:
        windows.settle()


def _of_this_thread(all_windows: Sequence[WindowsOfFunction]) -> list[CallRunner]:
    return [runner for windows in all_windows for runner in windows.of_this_thread()]


# -- the loop of a call -----------------------------------------------------------------------------------------------


def _begin(windows: WindowsOfFunction, loop: Loop, position: int) -> None:
    """From here on, calls in this thread belong to this loop."""
    before = windows.loops.get(loop.thread)
    if before is not None:
        before.is_superseded = True
    windows.loops[loop.thread], windows.position = loop, position
    windows.number_runs()
    windows.read_ahead.pop(loop.thread, None)


def loop_of_call(windows: WindowsOfFunction) -> Loop | None:
    """The loop that a call belongs to, if it is in one. Raises if the item of the call was read ahead."""
    thread = get_ident()
    loop = windows.loops.get(thread)
    if loop is not None:
        if loop.data.num_idle:
            loop.called_from = _call_stack()
        return loop
    # Items are read ahead by another thread, or by the code that goes on calling after its data has ended.
    ahead = next((one for one in [*windows.loops.values()] if not one.data.num_calls), None)
    ended = windows.read_ahead.get(thread)
    if ahead is None and ended is not None and _goes_on(ended):
        ahead = ended
    if ahead is not None:
        raise GradSyncError(
            f"Each item of {ahead.name} must have its call before the next item is drawn, but items were drawn "
            "ahead of the calls: the data ended with calls still to come. Put what reads ahead inside: "
            f"{ahead.name}(prefetch(loader)), and neither list({ahead.name}(loader)) nor "
            f"prefetch({ahead.name}(loader)). Call in the thread that draws the items. If all items were left out "
            f"on purpose, call {windows.name}.flush() or {windows.name}.reset() before you go on."
        )
    return None


def _goes_on(loop: Loop) -> bool:
    """Whether this call comes from the same place as the calls of a loop that has ended."""
    now, then = _call_stack(), loop.called_from
    if loop.data.num_calls:
        return now == then
    # All items were drawn without a call: this is the first call, in the function that drew them.
    return loop.data.num_items > 1 and any(
        frame[0] == now[0][0] and then[place + 1 :] == now[1:] for place, frame in enumerate(then)
    )


def _call_stack() -> tuple[tuple[int, int], ...]:
    """The frames above a call, outside of this package: code objects and places in them."""
    stack: list[tuple[int, int]] = []
    frame = sys._getframe(1)
    while frame is not None:
        if stack or not frame.f_globals.get("__name__", "").startswith("gradsync."):
            stack.append((id(frame.f_code), frame.f_lasti))
        frame = frame.f_back  # type: ignore[assignment]
    return tuple(stack)
