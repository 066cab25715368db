"""`Updater`: the update of a closed window, from the gradients' normalisation to the schedulers."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from gradsync._step_hook import stepping
from gradsync.decorator.participants import reference
from gradsync.decorator.progress import NO_UPDATE
from gradsync.functional import factor_of_update, move, refuse_nonfinite, step_optimizers, zero

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.amp import GradScaler

    from gradsync.decorator.body_watch import BodyWatch
    from gradsync.decorator.participants import Participants
    from gradsync.decorator.record import Record
    from gradsync.decorator.settings import Settings
    from gradsync.functional import Closing, Run, Team, Update, Window


class Updater:
    """Makes the updates of one call's windows. It holds neither schedulers nor the scaler."""

    def __init__(self, run: Run, settings: Settings, record: Record, watch: BodyWatch) -> None:
        self.run = run
        self.settings = settings
        self.record = record
        self.watch = watch
        self._schedulers: list[Callable[[], Any]] = []
        self._scaler: weakref.ref[GradScaler] | None = None
        self._making = NO_UPDATE  # the outcome of the current update

    def bind(self, participants: Participants) -> None:
        """Take note of a call's schedulers and scaler."""
        self._schedulers = [reference(scheduler) for scheduler in participants.schedulers]
        self._scaler = None if participants.scaler is None else weakref.ref(participants.scaler)

    @property
    def scaler(self) -> GradScaler | None:
        """The scaler, if there is one."""
        return None if self._scaler is None else self._scaler()

    def close(self, closing: Closing) -> None:
        """After the open window has synchronised: make its update, if it gets one, and close it."""
        window = self.run.window
        assert window is not None, "it is closed here"
        team = window.team
        self._making = NO_UPDATE
        factor = factor_of_update(self.settings.tail, closing)
        try:
            if factor is None:
                team.drop_gradients()
                self._clear(team)
            else:
                self.step(team, factor, window)
        finally:
            self.end_window()
            self.record.note(self._making, closing)  # an update, also where a scheduler failed after it
        if factor is not None:
            refuse_nonfinite(self._making, self.settings.nonfinite)

    def step(self, team: Team, factor: float, window: Window | None = None) -> Update:
        """Make the update with synchronised gradients, step the schedulers, and clear the gradients."""
        settings, scaler, optimizers = self.settings, self.scaler, self.run.who.optimizers
        self._making = NO_UPDATE
        try:
            if window is not None and window.scale is not None and scaler is not None:
                window.scale.correct(team.parameters, scaler)
            with stepping():
                self._making = made = step_optimizers(
                    optimizers,
                    scaler=scaler,
                    clip_norm=settings.clip_norm,
                    factor=factor,
                    nonfinite=settings.nonfinite,
                    spread=team.spread,
                )
                if made.stepped and self._schedulers:
                    move([one for ref in self._schedulers if (one := ref()) is not None], optimizers)
        finally:
            self._clear(team)
        return made

    def end_window(self) -> None:
        """Close the window, after it has synchronised. Its update may come later (`overlap`)."""
        window = self.run.window
        assert window is not None, "it ends here"
        self.record.size = window.size
        self.run.close()
        self.watch.forget()

    def note_landed(self, made: Update, closing: Closing) -> None:
        """The update of an earlier window was made when its gradients arrived: record it, and call `on_update`."""
        self.record.note(made, closing)
        refuse_nonfinite(made, self.settings.nonfinite)
        self.record.tell()

    def note_failed(self, closing: Closing) -> None:
        """An error ended the update, in the optimizer's step or in a scheduler's step after it."""
        self.record.note(self._making, closing)

    def _clear(self, team: Team) -> None:
        zero(self.run.who.optimizers)
        for parameter in team.unowned:
            parameter.grad = None
