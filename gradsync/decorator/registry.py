"""`Registry`: all windows of one decorated function. Finds the windows of a call; flushes, saves and loads all."""

from __future__ import annotations

import itertools
import sys
import warnings
import weakref
from contextlib import contextmanager, suppress
from threading import get_ident
from typing import TYPE_CHECKING, Any

import torch

from gradsync.decorator.call import Call
from gradsync.decorator.casting import cast_of, check_cast
from gradsync.decorator.checkpoint import VERSION, check, check_steps_of, load, progress_in, save, windows_in
from gradsync.decorator.loops import Loops
from gradsync.decorator.progress import Progress
from gradsync.decorator.unfinished import Unfinished
from gradsync.overlap import LEFT
from gradsync.ranks.meet import nothing_here

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from contextlib import AbstractContextManager

    from torch import nn

    from gradsync.decorator.casting import Cast
    from gradsync.decorator.loops import Key
    from gradsync.decorator.settings import Settings
    from gradsync.functional import Loop, Run

_MOST_RUNS = 1024  # of one function, in the numbers that the ranks of a loop call them by


class Registry:
    """The windows of a function, by instance and optimizers. They are dropped when their optimizer is."""

    def __init__(self, name: str, settings: Settings, place: tuple[str, int]) -> None:
        """`place` is the file and line of the function, for warnings."""
        self.name = name
        self._settings = settings
        self._place = place
        self._calls: list[tuple[Key, Call]] = []
        self._order = itertools.count()
        self._latest: dict[Key, weakref.ref[Call]] = {}
        self._loops = Loops(name)
        self._unfinished = Unfinished(name)
        self._loaded: dict[Key, list[dict[str, Any]]] = {}  # loaded states whose window has had no call yet
        self._loaded_latest: dict[Key, int | None] = {}  # the number of the state that was called last

    @property
    def settings(self) -> Settings:
        """What the function was decorated with."""
        return self._settings

    def call(
        self, function: Callable[..., Any], instance: object, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """One micro-batch."""
        key = _key(instance)
        participants = self._settings.casting.participants(instance, args, kwargs)
        latest = self._latest.get(key)
        call = None if latest is None else latest()
        if call is None or not call.has(participants):
            call = self._find(instance, key, participants, [*args, *kwargs.values()])
        if call.run.window is None:
            self._settings.casting.refuse_hidden(participants, args, kwargs, self.name)
        return call.micro_batch(function, args, kwargs, self._loop_of(key, call) if self._loops else None)

    # -- loops ------------------------------------------------------------------------------------------------------

    def looping(self, loop: Loop, instance: object, position: int) -> AbstractContextManager[None]:
        """Calls inside belong to `loop`."""
        return self._loops.running(loop, _key(instance), position)

    def note_idle(self, loop: Loop, instance: object) -> None:
        """The data of `loop` has ended."""
        self._loops.note_idle(loop, _key(instance))

    def runs(self, instance: object, position: int) -> list[Run]:
        """The runs that a loop in this thread may call, in the order of their first call."""
        runs = []
        for call in self._all(instance):
            if call.thread in {None, get_ident()}:
                call.run.key = position * _MOST_RUNS + call.order
                runs.append(call.run)
        return runs

    def call_of(self, run: Run) -> Call | None:
        """The call of a run."""
        return next((call for _, call in self._calls if call.run is run), None)

    def _loop_of(self, key: Key, call: Call) -> Loop | None:
        running = self._loops.of_call(key)
        if running is None:
            return None
        call.run.key = running.position * _MOST_RUNS + call.order
        return running.loop

    # -- all windows ------------------------------------------------------------------------------------------------

    def flush(self, instance: object) -> None:
        """Close all open windows."""
        self._insist_on_rest("flush()", instance)
        self._loops.forget_read_ahead(_key(instance))
        self._unfinished.forget(_key(instance))
        calls = self._all(instance)
        if not calls:
            nothing_here(f"flush of {self.name}")
        for call in calls:
            call.flush()

    def settle(self, instance: object) -> None:
        """Wait for what travels in this thread's windows, and make the updates."""
        for call in self._called(instance):
            if call.thread in {None, get_ident()}:
                call.settle()

    def land_before_boundary(self, instance: object) -> None:
        """This rank's data has ended: before the next boundary of the others, land what they land before it."""
        for call in self._called(instance):
            if call.thread in {None, get_ident()}:
                call.land_before_boundary()

    def go_back(self, instance: object) -> None:
        """After an exception: put the last true parameters back."""
        for call in self._called(instance):
            if call.ahead is not None and call.thread in {None, get_ident()}:
                call.ahead.go_back()

    def reset(self, instance: object) -> None:
        """Discard all open windows."""
        self._insist_on_rest("reset()", instance)
        self._loops.forget_read_ahead(_key(instance))
        self._unfinished.forget(_key(instance))
        for call in self._called(instance):
            call.reset()

    def progress(self, instance: object) -> Progress:
        """The progress of the window that was called last."""
        key = _key(instance)
        ref = self._latest.get(key)
        call = None if ref is None else ref()
        if call is not None:
            return call.progress
        latest = self._loaded_latest.get(key)
        return Progress() if latest is None else progress_in(self._loaded[key][latest])

    def state_dict(self, instance: object) -> dict[str, Any]:
        """The states of all windows, in the order of their first call, and the number of the last called."""
        key = _key(instance)
        calls, ref = self._called(instance), self._latest.get(key)
        for call in calls:
            call.settle()
        latest = next((place for place, one in enumerate(calls) if ref is not None and one is ref()), None)
        return {
            "version": VERSION,
            "windows": [*(save(call) for call in calls), *self._loaded.get(key, [])],
            "latest": latest if calls else self._loaded_latest.get(key),
        }

    def load_state_dict(self, state: dict[str, Any], instance: object) -> None:
        """Load the states. The state of a window without a call so far waits for the first call.

        All are checked before any is loaded. A window that the state does not have begins anew.
        """
        self._insist_on_rest("load_state_dict()", instance)
        key = _key(instance)
        states, calls = windows_in(state), self._called(instance)
        for call in calls:
            call.settle()
        for call, one in zip(calls, states, strict=False):
            check(call, one)
        for one in states:
            check_steps_of(one, self.name, self._settings.steps)
        self._unfinished.forget(key)
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
        """Called at the end of the function or the program."""
        for _, call in self._calls:
            self._warn_if_open(call)

    def forget(self, key: Key) -> None:
        """An instance is gone; another instance may get its id."""
        gone = [call for own, call in self._calls if own == key]
        self._calls = [(own, call) for own, call in self._calls if own != key]
        self._unfinished.forget(key)
        for table in (self._latest, self._loaded, self._loaded_latest):
            table.pop(key, None)
        for call in gone:
            self._warn_if_open(call)  # which may raise, where warnings are errors

    def _drop(self, call: Call) -> None:
        """An optimizer is gone: drop its windows."""
        for key in [own for own, one in self._calls if one is call]:
            self._unfinished.note(key, call.run)
        self._calls = [(key, one) for key, one in self._calls if one is not call]
        self._warn_if_open(call)  # which may raise, where warnings are errors

    def _warn_if_open(self, call: Call) -> None:
        # No warning after an error that ended the program.
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

    def _find(self, instance: object, key: Key, participants: Sequence[object], came: Sequence[object] = ()) -> Call:
        cast = cast_of(participants)
        check_cast(cast, self.name, came, is_method=instance is not None)
        call = next((one for own, one in self._calls if own == key and one.is_for(cast, instance)), None)
        if call is None:
            self._unfinished.check(key, cast.models, [one.run for own, one in self._calls if own == key])
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
        """At the first call of a window: load the state that waits for it."""
        waiting = self._loaded.get(key)
        if not waiting or call.record.num_steps:
            return
        with _keeping_buffers(cast.models if waiting[0]["index"] else ()):
            call.run.fit()
        check(call, waiting[0])
        load(call, waiting[0])
        self._loaded[key], self._loaded_latest[key] = waiting[1:], None

    def _insist_on_rest(self, what: str, instance: object) -> None:
        for call in self._called(instance):
            call.insist_on_rest(what)

    def _called(self, instance: object) -> list[Call]:
        """The calls of an instance, in the order of their first call."""
        key = _key(instance)
        return [call for own, call in self._calls if own == key]

    def _all(self, instance: object) -> list[Call]:
        """The same. If there is none, and the keywords name the participants, the call of those is made."""
        key, casting = _key(instance), self._settings.casting
        if casting.known() and not self._called(instance):
            self._find(instance, key, casting.participants(None, (), {}))
        return self._called(instance)


def _key(instance: object) -> Key:
    return None if instance is None else id(instance)


def _forgetting(registry: Registry, key: Key) -> Callable[[], None]:
    ref = weakref.ref(registry)

    def forget() -> None:
        alive = ref()
        if alive is not None:
            alive.forget(key)

    return forget


def _at_the_end_of(instance: object, forget: Callable[[], None]) -> None:
    """Call `forget` when the instance dies. With __slots__ nobody is told; its optimizer then ends its windows."""
    with suppress(TypeError):
        weakref.finalize(instance, forget).atexit = False


@contextmanager
def _keeping_buffers(models: Iterable[nn.Module]) -> Iterator[None]:
    """Keep the buffers: to make an engine copies those of rank 0, but mid-window each rank has its own."""
    buffers = [buffer for model in models for buffer in model.buffers()]
    kept = [buffer.clone() for buffer in buffers]
    yield
    with torch.no_grad():
        for buffer, own in zip(buffers, kept, strict=True):
            buffer.copy_(own)
