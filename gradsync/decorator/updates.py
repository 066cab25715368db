"""The update that a window closes with: gradients made a mean, clipped, stepped on and cleared, schedulers moved."""

from __future__ import annotations

import weakref
from contextlib import contextmanager
from threading import get_ident
from typing import TYPE_CHECKING, Any

from gradsync._registry import STEPPING
from gradsync.decorator.progress import ClosedLosses
from gradsync.decorator.reference import reference
from gradsync.functional import Update, move, refuse_nonfinite, step_optimizers, zero

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch.amp import GradScaler

    from gradsync.decorator.casting import Cast
    from gradsync.decorator.record import Record
    from gradsync.decorator.settings import Settings
    from gradsync.decorator.watches import GradientWatch
    from gradsync.functional import Closing, Run, Team


class Updates:
    """Makes the updates of one call's windows. It holds neither schedulers nor the scaler."""

    def __init__(self, run: Run, settings: Settings, record: Record, watch: GradientWatch) -> None:
        self.run = run
        self.settings = settings
        self.record = record
        self.is_stepping = False  # whether a step of the optimizer is ours
        self._watch = watch
        self._schedulers: list[Callable[[], Any]] = []
        self._scaler: weakref.ref[GradScaler] | None = None
        self._making = Update(stepped=False, grad_norm=None)

    def bind(self, cast: Cast) -> None:
        """Take note of a call's schedulers and scaler."""
        self._schedulers = [reference(scheduler) for scheduler in cast.schedulers]
        self._scaler = None if cast.scaler is None else weakref.ref(cast.scaler)

    @property
    def scaler(self) -> GradScaler | None:
        """The scaler, if there is one."""
        return None if self._scaler is None else self._scaler()

    def keeps(self, closing: Closing) -> bool:
        """Whether a window is to have an update at all."""
        return closing.factor is not None and (self.settings.tail != "drop" or closing.filled)

    def close(self, closing: Closing) -> None:
        """The gradients of the open window are synchronised: make its update, or what `tail` says."""
        window = self.run.window
        assert window is not None, "it is closed here"
        team = window.team
        closed, self._making = ClosedLosses(window, closing), Update(stepped=False, grad_norm=None)
        try:
            if closing.factor is None or not self.keeps(closing):
                team.drop_gradients()
            else:
                if window.scale is not None and self.scaler is not None:
                    window.scale.correct(team.parameters, self.scaler)
                self.step(team, closing.factor)
        finally:
            self._clear(team)
            self.end_window()
            self.record.note(self._making, closed)  # an update, also where a scheduler failed after it
        if self.keeps(closing):
            refuse_nonfinite(self._making, self.settings.nonfinite)

    def step(self, team: Team, factor: float) -> Update:
        """Make the update with synchronised gradients, and move the schedulers; the gradients are gone then."""
        try:
            with self.stepping():
                self._making = made = step_optimizers(
                    self.run.who.optimizers,
                    scaler=self.scaler,
                    clip_norm=self.settings.clip_norm,
                    factor=factor,
                    nonfinite=self.settings.nonfinite,
                    spread=team.spread,
                )
                if made.stepped:
                    there = (one for ref in self._schedulers if (one := ref()) is not None)
                    move(there, self.run.who.optimizers)
        finally:
            self._clear(team)
        return made

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """A step inside is ours."""
        found, self.is_stepping = self.is_stepping, True
        thread = get_ident()
        outermost = thread not in STEPPING
        STEPPING.add(thread)
        try:
            yield
        finally:
            self.is_stepping = found
            if outermost:
                STEPPING.discard(thread)

    def end_window(self) -> None:
        """The window that has synchronised is over, though its update may be still to come."""
        window = self.run.window
        assert window is not None, "it ends here"
        self.record.size = window.size
        self.run.close()
        self._watch.forget()

    def note_landed(self, made: Update, closed: ClosedLosses) -> None:
        """The update of an earlier window was made, whose gradients have travelled meanwhile: tell of it."""
        self.record.note(made, closed)
        refuse_nonfinite(made, self.settings.nonfinite)
        self.record.tell()

    def _clear(self, team: Team) -> None:
        zero(self.run.who.optimizers)
        for parameter in team.unowned:
            parameter.grad = None


def is_scaling(scaler: GradScaler | None) -> bool:
    """Whether losses are multiplied before their backward."""
    return scaler is not None and scaler.is_enabled()
