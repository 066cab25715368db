"""All windows of one decorated function: which of them a call belongs to, and what is done to all of them in turn."""

from __future__ import annotations

import itertools
import sys
import warnings
import weakref
from contextlib import contextmanager, suppress
from threading import get_ident
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from gradsync._errors import GradSyncError
from gradsync.decorator.call import Call
from gradsync.decorator.casting import cast_of, check_cast
from gradsync.decorator.checkpoint import VERSION, check_steps_of, load, progress_in, save, windows_in
from gradsync.decorator.progress import Progress
from gradsync.overlap import LEFT
from gradsync.ranks.meet import nothing_here

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from torch import nn

    from gradsync.decorator.casting import Cast
    from gradsync.decorator.settings import Settings
    from gradsync.functional import Loop, Run

Key = int | None  # id of the instance, for methods

_MOST_RUNS = 1024  # of one function, in the numbers that the ranks of a loop call them by


class _Running(NamedTuple):
    """A loop that runs, and the function's place among those that are nested in it."""

    loop: Loop
    key: Key
    position: int


class Registry:
    """The windows of a function, by instance and optimizers. They die with their optimizer."""

    def __init__(self, name: str, settings: Settings, place: tuple[str, int]) -> None:
        """`place` is the file and line of the function, for warnings."""
        self.name = name
        self._settings = settings
        self._place = place
        self._calls: list[tuple[Key, Call]] = []
        self._order = itertools.count()
        self._latest: dict[Key, weakref.ref[Call]] = {}
        self._running: list[_Running] = []
        self._read_ahead: dict[tuple[int, Key], Loop] = {}  # loops that ended with items that no call had come for
        self._loaded: dict[Key, list[dict[str, Any]]] = {}  # states that wait for their window's first call,
        self._loaded_latest: dict[Key, int | None] = {}  # and which of a function's was called last

    @property
    def settings(self) -> Settings:
        """What the function was decorated with."""
        return self._settings

    def call(
        self, function: Callable[..., Any], instance: object, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """One micro-batch."""
        key = None if instance is None else id(instance)
        everything = args if instance is None else (instance, *args)
        participants = self._settings.casting.participants(everything, kwargs)
        latest = self._latest.get(key)
        call = None if latest is None else latest()
        if call is None or not call.has(participants):
            call = self._find(instance, key, participants, [*args, *kwargs.values()])
        if call.run.window is None:
            self._settings.casting.refuse_hidden(cast_of(participants), args, kwargs, self.name)
        loop = None
        if self._running or self._read_ahead:
            loop = self._loop_of(key, call)
        return call.micro_batch(function, args, kwargs, loop)

    # -- loops ------------------------------------------------------------------------------------------------------

    @contextmanager
    def looping(self, loop: Loop, instance: object, position: int) -> Iterator[None]:
        """The calls inside know of `loop`."""
        key = None if instance is None else id(instance)
        for other in self._running:
            if other.key == key and other.loop.thread == loop.thread:
                other.loop.is_superseded = True
        self._running = [one for one in self._running if not one.loop.is_superseded]
        self._running.append(_Running(loop, key, position))
        self._read_ahead.pop((loop.thread, key), None)
        try:
            yield
        finally:
            self._running = [one for one in self._running if one.loop is not loop]

    def note_idle(self, loop: Loop, instance: object) -> None:
        """The data of `loop` has ended. Where items were drawn without a call, calls after it may be meant for them."""
        if loop.num_idle:
            if not loop.num_calls:
                loop.called_from = _call_stack()
            self._read_ahead[loop.thread, None if instance is None else id(instance)] = loop

    def runs(self, instance: object, position: int) -> list[Run]:
        """The windows that a loop in this thread may come to, in the order of their first call."""
        runs = []
        for call in self._all(instance):
            if call.thread in {None, get_ident()}:
                call.run.key = position * _MOST_RUNS + call.order
                runs.append(call.run)
        return runs

    def call_of(self, run: Run) -> Call | None:
        """Whose windows these are."""
        return next((call for _, call in self._calls if call.run is run), None)

    def _loop_of(self, key: Key, call: Call) -> Loop | None:
        thread = get_ident()
        for running in reversed(self._running):
            if running.key == key and running.loop.thread == thread:
                call.run.key = running.position * _MOST_RUNS + call.order
                if running.loop.num_idle:
                    running.loop.called_from = _call_stack()
                return running.loop
        elsewhere = next((one.loop for one in self._running if one.key == key and not one.loop.num_calls), None)
        ended = self._read_ahead.get((thread, key))
        if elsewhere is not None:
            raise GradSyncError(_READ_AHEAD.format(over=elsewhere.name, name=self.name))
        # A body that goes on after its data has ended had items that were drawn ahead; other calls come from elsewhere.
        if ended is not None and _goes_on(ended):
            raise GradSyncError(_READ_AHEAD.format(over=ended.name, name=self.name))
        return None

    # -- all windows ------------------------------------------------------------------------------------------------

    def flush(self, instance: object) -> None:
        """Close what is open."""
        self._forget_read_ahead(instance)
        calls = self._all(instance)
        if not calls:
            nothing_here(f"flush of {self.name}")
        for call in calls:
            call.flush()

    def settle(self, instance: object) -> None:
        """Land what travels, in this thread's windows."""
        for call in self._all(instance, make=False):
            if call.thread in {None, get_ident()}:
                call.settle()

    def go_back(self, instance: object) -> None:
        """An exception: parameters are the last true ones."""
        for call in self._all(instance, make=False):
            if call.ahead is not None and call.thread in {None, get_ident()}:
                call.ahead.go_back()

    def reset(self, instance: object) -> None:
        """Discard what is open."""
        self._forget_read_ahead(instance)
        for call in self._all(instance, make=False):
            call.reset()

    def progress(self, instance: object) -> Progress:
        """Of the window that was called last."""
        key = None if instance is None else id(instance)
        ref = self._latest.get(key)
        call = None if ref is None else ref()
        if call is not None:
            return call.progress
        latest = self._loaded_latest.get(key)
        return Progress() if latest is None else progress_in(self._loaded[key][latest])

    def state_dict(self, instance: object) -> dict[str, Any]:
        """All windows' states, in the order of their first call, and which of them was called last."""
        key = None if instance is None else id(instance)
        calls, ref = self._all(instance, make=False), self._latest.get(key)
        for call in calls:
            call.settle()
        latest = next((place for place, one in enumerate(calls) if ref is not None and one is ref()), None)
        return {
            "version": VERSION,
            "windows": [*(save(call) for call in calls), *self._loaded.get(key, [])],
            "latest": latest if calls else self._loaded_latest.get(key),
        }

    def load_state_dict(self, state: dict[str, Any], instance: object) -> None:
        """Put the states back; those of windows that are yet to be called wait for that.

        All are checked before one is loaded. A window whose first call came after the state was saved begins anew.
        """
        key = None if instance is None else id(instance)
        states, calls = windows_in(state), self._all(instance, make=False)
        for call in calls:
            call.settle()
        for call, one in zip(calls, states, strict=False):
            load(call, one, dry=True)
        for one in states:
            check_steps_of(one, self.name, self._settings.steps)
        for call in calls:
            call.begin_anew()
        for call, one in zip(calls, states, strict=False):
            load(call, one)
        latest = state["latest"]
        if latest is not None and latest < len(calls):
            self._latest[key] = weakref.ref(calls[latest])
        self._loaded[key], self._loaded_latest[key] = states[len(calls) :], None if calls else latest
        if instance is not None:
            _at_the_end_of(instance, _forgetting(self, key))

    def warn_if_open(self) -> None:
        """At the function's end, or the program's."""
        for _, call in self._calls:
            self._warn_if_open(call)

    def forget(self, key: Key) -> None:
        """An instance is gone: another one may get its id."""
        gone = [call for own, call in self._calls if own == key]
        self._calls = [(own, call) for own, call in self._calls if own != key]
        for table in (self._latest, self._loaded, self._loaded_latest):
            table.pop(key, None)
        for call in gone:
            self._warn_if_open(call)  # which may raise, where warnings are errors

    def _drop(self, call: Call) -> None:
        """An optimizer is gone, and its windows with it."""
        self._calls = [(key, one) for key, one in self._calls if one is not call]
        self._warn_if_open(call)  # which may raise, where warnings are errors

    def _warn_if_open(self, call: Call) -> None:
        # After an error that ended the program, an open window says nothing new.
        if call.ahead is not None and call.ahead.is_travelling:
            call.ahead.abandon()
            if getattr(sys, "last_value", None) is None:
                warnings.warn_explicit(LEFT.format(what=self.name), RuntimeWarning, *self._place)
        index, size, told = call.run.index, call.progress.size, call.run.told is call.run.window
        if not index:
            return
        call.run.abandon()
        if not told and getattr(sys, "last_value", None) is None:
            warnings.warn_explicit(
                f"{self.name} ended with a window open: {index} of {size} "
                f"micro-batches were accumulated and never used. Iterate with {self.name}.over(...), or call "
                f"{self.name}.flush() when the data ends.",
                RuntimeWarning,
                *self._place,
            )

    def _forget_read_ahead(self, instance: object) -> None:
        self._read_ahead.pop((get_ident(), None if instance is None else id(instance)), None)

    def _find(self, instance: object, key: Key, participants: Sequence[object], came: Sequence[object] = ()) -> Call:
        cast = cast_of(participants)
        check_cast(cast, self.name, came, is_method=instance is not None)
        call = next((one for own, one in self._calls if own == key and one.is_for(cast, instance)), None)
        if call is None:
            call = self._make(instance, key, cast)
        call.bind(cast, participants)
        self._latest[key] = weakref.ref(call)
        self._load_waiting(key, call, cast)
        return call

    def _make(self, instance: object, key: Key, cast: Cast) -> Call:
        call = Call(self.name, next(self._order), self._settings, cast, instance)
        self._calls.append((key, call))
        ours, theirs = weakref.ref(self), weakref.ref(call)

        def drop(_: object = None) -> None:
            registry, gone = ours(), theirs()
            if registry is not None and gone is not None:
                registry._drop(gone)

        call.ends = [weakref.ref(optimizer, drop) for optimizer in cast.optimizers]
        if instance is not None:
            _at_the_end_of(instance, _forgetting(self, key))
        return call

    def _load_waiting(self, key: Key, call: Call, cast: Cast) -> None:
        """Give a window that is called for the first time the state that waits for it."""
        waiting = self._loaded.get(key)
        if not waiting or call.record.num_steps:
            return
        with _keeping_buffers(cast.models if waiting[0]["index"] else ()):
            call.run.fit()
        load(call, waiting[0], dry=True)
        load(call, waiting[0])
        self._loaded[key], self._loaded_latest[key] = waiting[1:], None

    def _all(self, instance: object, *, make: bool = True) -> list[Call]:
        """In the order of their first call; where none has come and the participants are known, what it will make."""
        key = None if instance is None else id(instance)
        casting = self._settings.casting
        if make and casting.known() and not any(own == key for own, _ in self._calls):
            self._find(instance, key, casting.participants((), {}))
        return [call for own, call in self._calls if own == key]


_READ_AHEAD = (
    "Each item of {over} must have its call before the next item is drawn, but items were drawn ahead of the calls: "
    "the data ended with calls still to come. Put what reads ahead inside: {over}(prefetch(loader)), and neither "
    "list({over}(loader)) nor prefetch({over}(loader)). If all items were left out on purpose, call {name}.flush() or "
    "{name}.reset() before you go on."
)


def _goes_on(loop: Loop) -> bool:
    """Whether the call that comes now is one more of those in a loop that has ended."""
    now, then = _call_stack(), loop.called_from
    if loop.num_calls:
        return now == then
    # All items were drawn, and no call came: in the function that drew them, this is the first.
    drawn = then if isinstance(then, tuple) else ()
    return loop.num_items > 1 and any(
        frame[0] == now[0][0] and drawn[place + 1 :] == now[1:] for place, frame in enumerate(drawn)
    )


def _call_stack() -> tuple[tuple[int, int], ...]:
    """Where a call comes from, outside of this package: code and place in it, all the way up."""
    stack: list[tuple[int, int]] = []
    frame = sys._getframe(1)
    while frame is not None:
        if stack or not frame.f_globals.get("__name__", "").startswith("gradsync."):
            stack.append((id(frame.f_code), frame.f_lasti))
        frame = frame.f_back  # type: ignore[assignment]
    return tuple(stack)


def _forgetting(registry: Registry, key: Key) -> Callable[[], None]:
    ref = weakref.ref(registry)

    def forget() -> None:
        alive = ref()
        if alive is not None:
            alive.forget(key)

    return forget


def _at_the_end_of(instance: object, forget: Callable[[], None]) -> None:
    """Call `forget` when the instance dies; with __slots__ it tells nobody, and windows die with their optimizer."""
    with suppress(TypeError):
        weakref.finalize(instance, forget).atexit = False


@contextmanager
def _keeping_buffers(models: Iterable[nn.Module]) -> Iterator[None]:
    """Making an engine gives all ranks the buffers of rank 0, but in the middle of a window each has its own."""
    buffers = [buffer for model in models for buffer in model.buffers()]
    kept = [buffer.clone() for buffer in buffers]
    yield
    with torch.no_grad():
        for buffer, own in zip(buffers, kept, strict=True):
            buffer.copy_(own)
