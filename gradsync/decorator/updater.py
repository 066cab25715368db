"""`Updater`: makes the update of a window as it closes, from the gradients' normalisation to the schedulers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.amp import GradScaler

from gradsync._step_hook import stepping
from gradsync.decorator.body_watch import BodyWatch
from gradsync.decorator.participants import Participants, reference
from gradsync.decorator.progress import NO_UPDATE, Record
from gradsync.decorator.settings import Settings
from gradsync.functional import (
    Closing,
    Place,
    Run,
    Team,
    Update,
    Window,
    factor_of_update,
    move,
    refuse_nonfinite,
    step_optimizers,
    zero,
)


class Updater:
    """Makes the updates of one call's windows, each as its window closes. It holds neither schedulers nor the scaler.

    With `overlap`, an `Overlapped` takes its place, which makes them later. It overrides what does nothing here.
    """

    def __init__(self, run: Run, settings: Settings, record: Record, watch: BodyWatch) -> None:
        self.run = run
        self.settings = settings
        self.record = record
        self.watch = watch
        self._schedulers: list[Callable[[], Any]] = []
        self._scaler = reference(None)

    def bind(self, participants: Participants) -> None:
        """Take note of a call's schedulers and scaler."""
        self._schedulers = [reference(scheduler) for scheduler in participants.schedulers]
        self._scaler = reference(participants.scaler)

    @property
    def scaler(self) -> GradScaler | None:
        """The scaler, if there is one."""
        scaler: GradScaler | None = self._scaler()
        return scaler

    def close(self, closing: Closing) -> None:
        """After the open window has synchronised: make its update, if it gets one, and close it."""
        window = self.run.window
        assert window is not None, "it is closed here"
        team = window.team
        factor = factor_of_update(self.settings.tail, closing)
        if factor is None:
            self.record.note(NO_UPDATE, closing)
            team.drop_gradients()
            self._clear(team)
            self.end_window()
            return
        made = self.step(team, factor, closing, window)
        self.end_window()
        refuse_nonfinite(made, self.settings.nonfinite)

    def step(self, team: Team, factor: float, closing: Closing, window: Window | None = None) -> Update:
        """Make the update with synchronised gradients, step the schedulers, and clear the gradients.

        Without a `window`, it is that of an earlier window (`overlap`).
        """
        settings, scaler, optimizers = self.settings, self.scaler, self.run.who.optimizers
        made = NO_UPDATE
        try:
            if window is not None and window.scale is not None and scaler is not None:
                window.scale.correct(team.parameters, scaler)
            with stepping():
                made = step_optimizers(
                    optimizers,
                    scaler=scaler,
                    clip_norm=settings.clip_norm,
                    factor=factor,
                    nonfinite=settings.nonfinite,
                    spread=team.spread,
                )
                if made.stepped:
                    move([one for ref in self._schedulers if (one := ref()) is not None], optimizers)
        except BaseException:
            # If a step fails, the window stays open here, and is discarded. Other ranks may have closed theirs: the
            # next table shows it, and all ranks raise. If a scheduler fails, the update is made; the window closes.
            if made.stepped:
                if window is not None:
                    self.end_window()
                self.record.note(made, closing)
            elif window is None:
                self.run.take_back()
            raise
        finally:
            self._clear(team)
        self.record.note(made, closing)
        return made

    def end_window(self) -> None:
        """Close the window, after it has synchronised. Its update may come later (`overlap`)."""
        self.record.note_size()
        self.run.close()
        self.watch.forget()

    def _clear(self, team: Team) -> None:
        zero(self.run.who.optimizers)
        for parameter in team.unowned:
            parameter.grad = None

    # -- with `overlap` ---------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Called when a call begins."""

    def lands_before(self, place: Place) -> bool:  # noqa: ARG002 - for `Overlapped`
        """Whether the window before must land between the micro-batch of this last place and its boundary."""
        return False

    def land_before_boundary(self) -> None:
        """This rank's data has ended: land what the other ranks land before their next boundary."""

    def go_on(self, index: int) -> None:
        """The open window has had `index` micro-batches."""

    def settle(self) -> None:
        """Wait for gradients that still travel, and make their update."""

    def go_back(self) -> None:
        """After an exception: put the last true parameters back, without waiting."""

    def abandon(self) -> bool:
        """The function or the program ends: keep the last true parameters. Returns whether an update was to be made."""
        return False
