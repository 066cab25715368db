"""`Registry`: the `Windows` of one decorated function. Finds those of a call; flushes, saves and loads all."""

from __future__ import annotations

import itertools
import sys
import warnings
import weakref
from contextlib import contextmanager, suppress
from threading import get_ident
from typing import TYPE_CHECKING, Any

import torch

from gradsync.decorator.checkpoint import VERSION, check, check_steps_of, load, progress_in, save, windows_in
from gradsync.decorator.loops import Loops
from gradsync.decorator.orphaned import Orphaned
from gradsync.decorator.participants import check_complete, participants_of
from gradsync.decorator.progress import Progress
from gradsync.decorator.windows import Windows
from gradsync.overlap import LEFT
from gradsync.ranks.meet import nothing_here

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from contextlib import AbstractContextManager

    from torch import nn

    from gradsync.decorator.loops import Key
    from gradsync.decorator.participants import Participants
    from gradsync.decorator.settings import Settings
    from gradsync.functional import Loop, Run

_MOST_NESTED = 64  # functions of nested `.over`s, in the numbers that the ranks of a loop call their runs by


class Registry:
    """The windows of a function, by instance and optimizers. They are dropped when their optimizer is."""

    def __init__(self, name: str, settings: Settings, place: tuple[str, int]) -> None:
        """`place` is the file and line of the function, for warnings."""
        self.name = name
        self._settings = settings
        self._place = place
        self._every: list[tuple[Key, Windows]] = []
        self._order = itertools.count()
        self._latest: dict[Key, weakref.ref[Windows]] = {}
        self._loops = Loops(name)
        self._orphaned = Orphaned(name)
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
        found = self._settings.finder.find(instance, args, kwargs)
        latest = self._latest.get(key)
        windows = None if latest is None else latest()
        if windows is None or not windows.has(found):
            windows = self._find(instance, key, found, [*args, *kwargs.values()])
        if windows.run.window is None:
            self._settings.finder.refuse_hidden(found, args, kwargs, self.name)
        return windows.micro_batch(function, args, kwargs, self._loop_of(key, windows) if self._loops else None)

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
        for windows in self._all(instance):
            if windows.thread in {None, get_ident()}:
                windows.run.key = windows.order * _MOST_NESTED + position
                runs.append(windows.run)
        return runs

    def windows_of(self, run: Run) -> Windows | None:
        """The windows of a run."""
        return next((windows for _, windows in self._every if windows.run is run), None)

    def _loop_of(self, key: Key, windows: Windows) -> Loop | None:
        running = self._loops.of_call(key)
        if running is None:
            return None
        windows.run.key = windows.order * _MOST_NESTED + running.position
        return running.loop

    # -- all windows ------------------------------------------------------------------------------------------------

    def flush(self, instance: object) -> None:
        """Close all open windows."""
        self._insist_on_rest("flush()", instance)
        self._loops.forget_read_ahead(_key(instance))
        self._orphaned.forget(_key(instance))
        every = self._all(instance)
        if not every:
            nothing_here(f"flush of {self.name}")
        for windows in every:
            windows.flush()

    def settle(self, instance: object) -> None:
        """Wait for what travels in this thread's windows, and make the updates."""
        for windows in self._of_this_thread(instance):
            windows.settle()

    def land_before_boundary(self, instance: object) -> None:
        """This rank's data has ended: before the next boundary of the others, land what they land before it."""
        for windows in self._of_this_thread(instance):
            windows.land_before_boundary()

    def go_back(self, instance: object) -> None:
        """After an exception: put the last true parameters back."""
        for windows in self._of_this_thread(instance):
            if windows.ahead is not None:
                windows.ahead.go_back()

    def reset(self, instance: object) -> None:
        """Discard all open windows."""
        self._insist_on_rest("reset()", instance)
        self._loops.forget_read_ahead(_key(instance))
        self._orphaned.forget(_key(instance))
        for windows in self._called(instance):
            windows.reset()

    def progress(self, instance: object) -> Progress:
        """The progress of the window that was called last."""
        key = _key(instance)
        ref = self._latest.get(key)
        windows = None if ref is None else ref()
        if windows is not None:
            return windows.progress
        latest = self._loaded_latest.get(key)
        return Progress() if latest is None else progress_in(self._loaded[key][latest])

    def state_dict(self, instance: object) -> dict[str, Any]:
        """The states of all windows, in the order of their first call, and the number of the last called."""
        key = _key(instance)
        every, ref = self._called(instance), self._latest.get(key)
        for windows in every:
            windows.settle()
        latest = next((place for place, one in enumerate(every) if ref is not None and one is ref()), None)
        return {
            "version": VERSION,
            "windows": [*(save(windows) for windows in every), *self._loaded.get(key, [])],
            "latest": latest if every else self._loaded_latest.get(key),
        }

    def load_state_dict(self, state: dict[str, Any], instance: object) -> None:
        """Load the states. The state of a window without a call so far waits for the first call.

        All are checked before any is loaded. A window that the state does not have begins anew.
        """
        self._insist_on_rest("load_state_dict()", instance)
        key = _key(instance)
        states, every = windows_in(state), self._called(instance)
        for windows in every:
            windows.settle()
        for windows, one in zip(every, states, strict=False):
            check(windows, one)
        for one in states:
            check_steps_of(one, self.name, self._settings.steps)
        self._orphaned.forget(key)
        for windows in every:
            windows.begin_anew()
        for windows, one in zip(every, states, strict=False):
            load(windows, one)
        latest = state["latest"]
        if latest is not None and latest < len(every):
            self._latest[key] = weakref.ref(every[latest])
        self._loaded[key], self._loaded_latest[key] = states[len(every) :], None if every else latest
        if instance is not None:
            _at_the_end_of(instance, _forgetting(self, key))

    def warn_if_open(self) -> None:
        """Called at the end of the function or the program."""
        for _, windows in self._every:
            self._warn_if_open(windows)

    def forget(self, key: Key) -> None:
        """An instance is gone; another instance may get its id."""
        gone = [windows for own, windows in self._every if own == key]
        self._every = [(own, windows) for own, windows in self._every if own != key]
        self._orphaned.forget(key)
        for table in (self._latest, self._loaded, self._loaded_latest):
            table.pop(key, None)
        for windows in gone:
            self._warn_if_open(windows)  # which may raise, where warnings are errors

    def _drop(self, windows: Windows) -> None:
        """An optimizer is gone: drop its windows."""
        for key in [own for own, one in self._every if one is windows]:
            self._orphaned.note(key, windows.run)
        self._every = [(key, one) for key, one in self._every if one is not windows]
        self._warn_if_open(windows)  # which may raise, where warnings are errors

    def _warn_if_open(self, windows: Windows) -> None:
        # No warning after an error that ended the program.
        if windows.ahead is not None and windows.ahead.is_travelling:
            windows.ahead.abandon()
            if getattr(sys, "last_value", None) is None:
                warnings.warn_explicit(LEFT.format(what=self.name), RuntimeWarning, *self._place)
        index, size, told = windows.run.index, windows.progress.size, windows.run.told is windows.run.window
        if not index:
            return
        windows.run.abandon()
        if not told and getattr(sys, "last_value", None) is None:
            warnings.warn_explicit(
                f"{self.name} ended with a window open: {index} of {size} "
                f"micro-batches were accumulated and never used. Iterate with {self.name}.over(...), or call "
                f"{self.name}.flush() when the data ends.",
                RuntimeWarning,
                *self._place,
            )

    def _find(self, instance: object, key: Key, found: Sequence[object], came: Sequence[object] = ()) -> Windows:
        participants = participants_of(found)
        check_complete(participants, self.name, came, is_method=instance is not None)
        windows = next((one for own, one in self._every if own == key and one.is_for(participants, instance)), None)
        if windows is None:
            self._orphaned.check(key, participants.models, [one.run for own, one in self._every if own == key])
            windows = self._make(instance, key, participants)
        windows.bind(participants, found)
        self._latest[key] = weakref.ref(windows)
        self._load_waiting(key, windows, participants)
        return windows

    def _make(self, instance: object, key: Key, participants: Participants) -> Windows:
        windows = Windows(self.name, next(self._order), self._settings, participants, instance)
        self._every.append((key, windows))
        ours, theirs = weakref.ref(self), weakref.ref(windows)

        def drop(_: object = None) -> None:
            registry, gone = ours(), theirs()
            if registry is not None and gone is not None:
                registry._drop(gone)

        windows.ends = [weakref.ref(optimizer, drop) for optimizer in participants.optimizers]
        if instance is not None:
            _at_the_end_of(instance, _forgetting(self, key))
        return windows

    def _load_waiting(self, key: Key, windows: Windows, participants: Participants) -> None:
        """At the first call of a window: load the state that waits for it."""
        waiting = self._loaded.get(key)
        if not waiting or windows.record.num_steps:
            return
        with _keeping_buffers(participants.models if waiting[0]["index"] else ()):
            windows.run.fit()
        check(windows, waiting[0])
        load(windows, waiting[0])
        self._loaded[key], self._loaded_latest[key] = waiting[1:], None

    def _insist_on_rest(self, what: str, instance: object) -> None:
        for windows in self._called(instance):
            windows.insist_on_rest(what)

    def _called(self, instance: object) -> list[Windows]:
        """Those of an instance, in the order of their first call."""
        key = _key(instance)
        return [windows for own, windows in self._every if own == key]

    def _of_this_thread(self, instance: object) -> list[Windows]:
        """Those that no other thread has called last."""
        return [windows for windows in self._called(instance) if windows.thread in {None, get_ident()}]

    def _all(self, instance: object) -> list[Windows]:
        """The same. If there is none, and the keywords name the participants, the windows of those are made."""
        key, finder = _key(instance), self._settings.finder
        if finder.known() and not self._called(instance):
            self._find(instance, key, finder.find(None, (), {}))
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
