"""`CallRunner`: runs a call of a step function: the function, its backward, and at the boundary the update."""

from __future__ import annotations

import atexit
import sys
import warnings
import weakref
from collections.abc import Callable, Sequence
from threading import get_ident
from typing import Any

from torch import nn
from torch.optim import Optimizer

from gradsync._errors import GradSyncError
from gradsync._state import RUNNERS
from gradsync._step_hook import watch_steps
from gradsync.decorator.body import Replay, SkippableBody
from gradsync.decorator.late_updater import LateUpdater
from gradsync.decorator.participants import Call, Participants, reference
from gradsync.decorator.progress import Reporter
from gradsync.decorator.settings import Settings
from gradsync.decorator.updater import Updater
from gradsync.functional import Closing, InParts, Loop, Place, Role, Run, Who, check_steppable, detach, owned
from gradsync.overlap.compress_of_bare import Compressed
from gradsync.ranks.lost import WaitingFor


class CallRunner:
    """Runs the calls of one (function, instance, optimizers), window by window, until one of the optimizers is gone."""

    def __init__(
        self, name: str, number: int, settings: Settings, instance: Callable[[], object], place: tuple[str, int]
    ) -> None:
        self.number = number  # among the runners of the function, or of the instance
        self._place = place  # the function's file and line, for warnings
        self.run = Run(name, settings.terms(), number)
        self.thread: int | None = None  # of the last call
        self.body = SkippableBody(self.run)
        self.reporter = Reporter(self.run, settings.on_update, instance)
        if settings.compress is not None and not settings.overlap:  # overlap compresses by itself
            self.run.transport = Compressed()
        self.updater = (LateUpdater if settings.overlap else Updater)(self.run, settings, self.reporter)
        self._in_parts = None if settings.fit is False else InParts(settings.fit, name)
        self._participants: list[Callable[[], object]] = []
        self._counted: list[Callable[[], object]] = []  # those whose replacement counts in `run.num_changes`
        self.ends: list[weakref.ref[Any]] = []  # their callbacks tell that an optimizer is gone
        self.is_running = False
        watch_steps(self)
        RUNNERS.add(self)

    # -- participants -----------------------------------------------------------------------------------------------

    def has(self, found: Sequence[object]) -> bool:
        """Whether these are the participants of the last call, by identity (quick)."""
        refs = self._participants
        if len(refs) != len(found):
            return False
        for ref, one in zip(refs, found):  # noqa: B905, SIM110 - in every call; strict= and all() cost time
            if ref() is not one:
                return False
        return True

    def bind(self, participants: Participants, found: Sequence[object]) -> None:
        """Take note of a call's participants."""
        self.updater.settle()
        run, models = self.run, participants.models
        if [*map(id, run.who.models)] != [*map(id, models)]:
            if run.window is not None:
                raise GradSyncError(
                    f"{run.name} must be called with the same models throughout a window, but they changed in the "
                    "middle of one. Call flush() before another model comes."
                )
            run.who = Who(models, participants.optimizers)
        # A loss module without parameters may be a new object in each call.
        counted = [one for one in found if not isinstance(one, nn.Module) or next(one.parameters(), None) is not None]
        if [id(ref()) for ref in self._counted] != [*map(id, counted)]:
            for one in (*participants.optimizers, *participants.schedulers):
                check_steppable(one)
            run.num_changes += 1
            run.compare_too(participants.in_words())
            self._counted = [reference(one) for one in counted]
        self._participants = [reference(one) for one in found]
        self.updater.schedulers = [reference(scheduler) for scheduler in participants.schedulers]
        self.updater.scaler = reference(participants.scaler)

    def before_step(self, optimizer: Optimizer) -> None:
        """Called before any optimizer steps: raises in the middle of a window.

        It compares parameters, because the user may have made another optimizer, or one that steps in the backward.
        """
        if self.run.index == 0 and not self.is_running:
            return
        if not set(map(id, owned(self.run.who.optimizers))).isdisjoint(map(id, owned([optimizer]))):
            raise GradSyncError(
                f"{self.run.name} steps its optimizer itself at each boundary, but something called "
                f"optimizer.step(), of type {type(optimizer).__name__}, in the middle of a window, on gradients that "
                "are not synchronised. Remove that call; an optimizer that steps in the backward cannot accumulate."
            )

    # -- a call -----------------------------------------------------------------------------------------------------

    def __enter__(self) -> None:
        """Around one place. An error discards the open window; else `on_update` is called, if there was an update."""
        self.is_running = True
        self.reporter.begin()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.is_running = False
        if kind is None:
            self.reporter.call_on_update()
        else:
            self.discard()

    def run_call(self, call: Call, loop: Loop | None) -> Any:
        """Run the user's function on one micro-batch, its backward, and at the boundary the update."""
        run, updater, reporter = self.run, self.updater, self.reporter
        if self.is_running or reporter.is_in_on_update:
            raise GradSyncError(
                f"{run.name} must not be called from its own body or on_update: a micro-batch is one call, and "
                "ranks that have run out make updates without one. Call the model instead."
            )
        self.thread = get_ident()
        with self:
            place = run.start(run.who, loop)
            reporter.now.size = place.size
            updater.begin()  # not before the ranks have met: one without an item lands then, too
            if place.last and updater.lands_before_boundary:
                returned, _ = self._forward_and_backward(place._replace(last=False), call, loop)
                updater.settle()
                closing = run.miss(place._replace(index=run.index, role=Role.MISSES))  # synchronises what was held
            else:
                returned, closing = self._forward_and_backward(place, call, loop)
            reporter.now.micro_steps += 1
            self._end_place(closing)
        return returned

    def _forward_and_backward(self, place: Place, call: Call, loop: Loop | None) -> tuple[Any, Closing | None]:
        """Run the function and its backward; returns what it returned, and in the last place the closing."""
        run, now, scaler = self.run, self.reporter.now, self.updater.scaler()
        window = run.open_window
        team = window.team
        if place.index == 0:
            self.body.begin(team)
        with run.holding(place):
            if self._in_parts is not None:
                ran = self._in_parts.run(run, place, *call, scaler=scaler, changes=self.body.check)
                now.parts, now.rows = self._in_parts.parts, self._in_parts.rows
                return ran
            replay = Replay(*call) if team.forward_communicates else None
            returned, loss = self.body(call, team)
            if loss is not None:
                self.body.check()
                num_dropped = window.num_dropped
                closing = run.backward(place, loss, scaler=scaler)
                returned = detach(returned, loss) if window.num_dropped == num_dropped else None
                if replay is not None:
                    run.replay = replay
                    if loop is not None:
                        loop.kept[run] = call  # its arguments live as long as the loop
                    if run.terms.skip:  # the next call may be dropped, in this loop or behind it
                        replay.keep_data()
            elif team.lockstep:
                window.drop()
                closing = self._run_again(place._replace(role=Role.REPEATS))
            else:
                closing = run.drop(place)
        return returned, closing

    def _run_again(self, place: Place) -> Closing | None:
        with WaitingFor(self.run.open_window.what), self.run.holding(place):
            closing = self.run.backward(place, self.body.again())
        self.reporter.now.replays += 1
        return closing

    def _end_place(self, closing: Closing | None) -> None:
        """After a micro-batch; in the last place, make the update, or with `overlap` leave it until gradients land."""
        if closing is None:
            self.body.remember()
            self.updater.go_on(self.run.index)
        elif closing.had_calls:
            with WaitingFor(self.run.open_window.what):
                self.updater.close(closing)
            self.body.forget()
        else:  # no rank had a call
            self.updater.settle()
            self.discard()

    # -- without a call ---------------------------------------------------------------------------------------------

    def take_part(self, place: Place) -> None:
        """After this rank's data has ended: close its own open window, or take part in a window of the other ranks."""
        with self:
            self.reporter.now.size = place.size
            self._end_place(self._run_again(place) if place.role is Role.REPEATS else self.run.miss(place))
        self.land_before_boundary()

    def land_before_boundary(self) -> None:
        """This rank's data has ended: land the gradients that the others land before their next boundary."""
        if self.updater.lands_before_boundary:
            with self:  # like the other ranks
                self.updater.settle()

    def flush(self) -> None:
        """Close the open window now. Collective."""
        self.updater.settle()
        if not self.run.agree_to_flush():
            return
        with self:
            closing = self.run.flush_agreed()
            self.reporter.now.size = self.run.open_window.size
            self._end_place(closing)
            self.updater.settle()

    def discard(self) -> None:
        """Discard the open window and its gradients. Without one, gradients may be another function's, and stay."""
        self.updater.go_back()
        self.run.discard()
        self.body.forget()

    # -- the end ----------------------------------------------------------------------------------------------------

    def __del__(self) -> None:
        self.warn_if_open()

    def warn_if_open(self) -> None:
        """Called at the end of the function, the instance, an optimizer or the program."""
        name, window = self.run.name, self.run.window
        lost = self.updater.abandon()
        if lost is not None:
            self._warn(lost)
        if window is None or not window.index:
            return
        self.run.abandon()
        if not window.is_warned_of:
            self._warn(
                f"{name} ended with a window open: {window.index} of {self.reporter.now.size} micro-batches were "
                f"accumulated and never used. Iterate with {name}.over(...), or call {name}.flush() when the data ends."
            )

    def _warn(self, text: str) -> None:
        # No warning after an error that ended the program; in a notebook, an error ends a cell only.
        if getattr(sys, "last_value", None) is None or hasattr(sys, "ps1"):
            warnings.warn_explicit(text, RuntimeWarning, *self._place)


@atexit.register
def _warn_of_open_windows() -> None:
    for runner in list(RUNNERS):
        runner.warn_if_open()
