"""`WindowsOfFunction`: finds the windows that a call of a function belongs to; flushes, saves and loads all of them."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from threading import get_ident
from typing import Any

from torch import nn

from gradsync._errors import GradSyncError
from gradsync.decorator.call_runner import CallRunner
from gradsync.decorator.checkpoint import VERSION, check, load, progress_in, save, windows_in, without_window
from gradsync.decorator.participants import Call, participants_of, reference
from gradsync.decorator.progress import Progress
from gradsync.decorator.settings import Settings
from gradsync.engines import find
from gradsync.functional import Loop, Run, Who, discard
from gradsync.ranks.meet import no_item_here

# Functions in nested `.over`s. A run's key is its runner's number times this, plus its function's position.
_MOST_NESTED = 64


class WindowsOfFunction:
    """The windows of a function, and of a method for each instance (`of`).

    Calls with the same optimizers are micro-batches of the same windows. `every` has one `CallRunner` for each set of
    optimizers; it is dropped when one of these is gone.
    """

    def __init__(self, name: str, settings: Settings, place: tuple[str, int], instance: object = None) -> None:
        """`place` is the function's file and line, for warnings."""
        self.name = name
        self.settings = settings
        self.instance = reference(instance)
        self.loops: dict[int, Loop] = {}  # by thread: the loop that runs in it
        self.read_ahead: dict[int, Loop] = {}  # by thread: a loop that has ended with items without a call
        self.position = 0  # among the functions of nested `.over`s
        self._place = place
        self._numbers = itertools.count()  # of the runners
        self._of: dict[int, WindowsOfFunction] = {}  # those of a method, by the id of its instance
        self.every: list[CallRunner] = []  # in the order of their first call
        self._latest: CallRunner | None = None
        self._last = Progress()  # of windows whose optimizer is gone
        self._cut_off: list[Who] = []  # whose windows were open when their optimizer died
        self._loaded: list[dict[str, Any]] = []  # loaded states whose window has had no call yet
        self._loaded_latest: int | None = None  # the number of the state that was called last

    def of(self, instance: object) -> WindowsOfFunction:
        """Those of one instance. They end with it; one with __slots__ cannot be watched: with its optimizers."""
        if instance is None:
            return self
        own = self._of.get(id(instance))
        if own is None:
            made = WindowsOfFunction(self.name, self.settings, self._place, instance)
            own = self._of.setdefault(id(instance), made)  # another thread may have made it meanwhile
            if own is made:
                with suppress(TypeError):
                    weakref.finalize(instance, _weakly(self._forget), id(instance)).atexit = False
        return own

    def call(self, call: Call, loop: Loop | None) -> Any:
        """One micro-batch, in a loop or not."""
        runner, settings = self._latest, self.settings
        _, args, kwargs = call
        found = settings.find(self.instance(), args, kwargs)
        if runner is None or not runner.has(found):
            settings.refuse_defaults(call, self.name)
            runner = self._find(found, [*args, *kwargs.values()])
        if runner.run.window is None:
            settings.refuse_hidden(found, args, kwargs, self.name)
        return runner.run_call(call, loop)

    # -- all windows ------------------------------------------------------------------------------------------------

    def of_this_thread(self) -> list[CallRunner]:
        """Those whose last call was in this thread, or that have had none."""
        return [runner for runner in self.every if runner.thread in {None, get_ident()}]

    def runs(self) -> list[Run]:
        """The runs that a loop in this thread may call, in the order of their first call."""
        self._find_known()
        return [runner.run for runner in self.of_this_thread()]

    def number_runs(self) -> None:
        """Give the runs the keys by which the ranks of a loop name them."""
        for runner in self.every:
            runner.run.key = runner.number * _MOST_NESTED + self.position

    def flush(self) -> None:
        """Close all open windows."""
        self._end_what_is_open("flush()")
        self._find_known()
        if not self.every:
            waiting = sum(state["index"] for state in self._loaded)
            if waiting:
                raise GradSyncError(
                    f"flush of {self.name} needs the models and optimizers of the window that was loaded, of "
                    f"{waiting} micro-batches, but no call has brought them yet. Name them: "
                    "accumulating(..., model=..., optimizer=...), or call reset() to drop that window."
                )
            no_item_here(f"flush of {self.name}")
        for runner in [*self.every]:
            runner.flush()

    def settle(self) -> None:
        """Wait for what travels in this thread's windows, and make the updates."""
        for runner in self.of_this_thread():
            runner.updater.settle()

    def reset(self) -> None:
        """Discard all open windows."""
        self._end_what_is_open("reset()")
        for runner in [*self.every]:
            runner.discard()
        self._loaded = [*map(without_window, self._loaded)]

    @property
    def progress(self) -> Progress:
        """The progress of the window that was called last."""
        if self._latest is not None:
            return self._latest.reporter.progress
        return self._last if self._loaded_latest is None else progress_in(self._loaded[self._loaded_latest])

    def state_dict(self) -> dict[str, Any]:
        """The states of all windows, in the order of their first call, and the number of the last called."""
        every = [*self.every]
        for runner in every:
            runner.updater.settle()
        latest = next((place for place, one in enumerate(every) if one is self._latest), None)
        return {
            "version": VERSION,
            "windows": [*map(save, every), *self._loaded],
            "latest": latest if every else self._loaded_latest,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the states. The state of a window without a call so far waits for the first call.

        Those of known windows are all checked before any is loaded, the others in their first call. A window that the
        state does not have begins anew.
        """
        self._end_what_is_open("load_state_dict()")
        every, states = [*self.every], windows_in(state, self.name, self.settings.steps)
        for runner in every:
            runner.updater.settle()
        known = [*zip(every, states, strict=False)]
        for runner, one in known:
            check(runner.run, one)
        for runner in every:
            runner.discard()
            runner.reporter.go_on_from(Progress())
        for runner, one in known:
            load(runner, one)
        latest = state["latest"]
        if latest is not None and latest < len(every):
            self._latest = every[latest]
        self._loaded, self._loaded_latest = states[len(every) :], None if every else latest

    def _end_what_is_open(self, what: str) -> None:
        """Raise in the middle of a micro-batch of this thread, whose window `what` would close or replace.

        Else forget items without a call, and windows without their optimizer: `what` leaves them on purpose.
        """
        if any(runner.is_running for runner in self.of_this_thread()):
            raise GradSyncError(
                f"{what} of {self.name} came in the middle of a call: in its body, or in an on_update that runs while "
                "the next window is open (overlap). Ranks whose data has ended run that on_update at another time. "
                "Call it between two calls, or after the loop."
            )
        self.read_ahead.pop(get_ident(), None)
        self._cut_off.clear()

    # -- the windows of a call --------------------------------------------------------------------------------------

    def _find(self, found: Sequence[object], came: Sequence[object] = ()) -> CallRunner:
        participants = participants_of(found, came, self.name, is_method=self.instance() is not None)
        optimizers = [*participants.optimizers]
        runner = next((one for one in self.every if one.run.who.optimizers == optimizers), None)
        if runner is None:
            self._drop_cut_off(participants.models)
            runner = CallRunner(self.name, next(self._numbers), self.settings, self.instance, self._place)
            runner.ends = [weakref.ref(optimizer, _weakly(self._drop)) for optimizer in optimizers]
        runner.bind(participants, found)
        if runner not in self.every:
            self.every.append(runner)
            self.number_runs()
        if self._loaded and not runner.reporter.now.micro_steps:
            state, *others = self._loaded
            load(runner, state)
            self._loaded, self._loaded_latest = others, None
        self._latest = runner  # only now: as long as the state does not fit, each call says so
        return runner

    def _find_known(self) -> None:
        """If there are no windows, and the keywords name the participants, make the windows of those."""
        if not self.every and self.settings.known():
            self._find(self.settings.find(None, (), {}))

    # -- the end of windows -----------------------------------------------------------------------------------------

    def _forget(self, key: int) -> None:
        """An instance is gone; another instance may get its id."""
        del self._of[key]

    def _drop(self, end: weakref.ref[Any]) -> None:
        """An optimizer is gone: drop its windows."""
        gone = [runner for runner in self.every if end in runner.ends]
        self.every = [runner for runner in self.every if runner not in gone]  # a new list: somebody may go through it
        for runner in gone:
            if runner.run.index:
                self._cut_off.append(runner.run.who)
            if runner is self._latest:
                self._latest, self._last = None, runner.reporter.progress

    def _drop_cut_off(self, models: Sequence[nn.Module]) -> None:
        """An optimizer is new: drop open windows of `models` whose optimizer it replaces, and raise if there are any.

        An optimizer that is alive may have a window of the same models open (a GAN). That is an error only if the
        models have lost parameters since.
        """
        mine = set(map(id, models))
        runs = [one.run for one in self.every if not mine.isdisjoint(map(id, one.run.who.models))]
        edited = [run for run in runs if _is_edited(run)]
        ended = [who for who in self._cut_off if not mine.isdisjoint(map(id, who.models))]
        self._cut_off = [who for who in self._cut_off if who not in ended and who.models]
        for run in edited:
            run.discard()
        for who in ended:
            with suppress(GradSyncError):  # from an engine that the edit has broken; the error below tells of the edit
                for engine in find(who.models):
                    engine.discard()
            discard(parameter for model in who.models for parameter in model.parameters())
        if ended or edited:
            what = ", and the models have lost parameters since it was opened" if edited else ""
            raise GradSyncError(
                f"The participants of {self.name} must stay the same within a window, but they changed in the middle "
                f"of one: the optimizer was made anew{what}. That window is dropped. Make such a change between "
                "windows, where progress.index is 0, or call flush() or reset() first."
            )


def _is_edited(run: Run) -> bool:
    """Whether the models have lost parameters since the open window was opened."""
    if run.window is None or not run.index or run.window.team.holds_inside:
        return False
    here = {id(parameter) for model in run.who.models for parameter in model.parameters()}
    return not run.window.team.in_models <= here


def _weakly(method: Callable[[Any], None]) -> Callable[[Any], None]:
    """The method, as a callback that does not keep its object alive."""
    ref = weakref.WeakMethod(method)

    def call(one: Any) -> None:
        alive = ref()
        if alive is not None:
            alive(one)

    return call
