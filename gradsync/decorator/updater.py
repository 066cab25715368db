"""`Updater`: makes the update of a window as it closes, from the gradients' normalisation to the schedulers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.amp import GradScaler

from gradsync._step_hook import stepping
from gradsync.decorator.participants import reference
from gradsync.decorator.progress import Reporter
from gradsync.decorator.settings import Settings
from gradsync.functional import (
    Closing,
    Run,
    Team,
    Update,
    Window,
    move,
    refuse_nonfinite,
    step_optimizers,
    zero,
)

_NO_UPDATE = Update(stepped=False, grad_norm=None)


class Updater:
    """Makes the updates of one call's windows, each as its window closes.

    `schedulers` and `scaler` refer to those of the last call, and keep none alive.

    With `overlap`, a `LateUpdater` takes its place, which makes them later. It overrides what does nothing here.
    """

    def __init__(self, run: Run, settings: Settings, reporter: Reporter) -> None:
        self.run = run
        self.settings = settings
        self.reporter = reporter
        self.schedulers: list[Callable[[], Any]] = []
        self.scaler: Callable[[], GradScaler | None] = reference(None)

    def close(self, closing: Closing) -> None:
        """After the open window has synchronised: make its update, if it gets one, and close it."""
        window = self.run.open_window
        if closing.factor is None:
            self.reporter.note(_NO_UPDATE, closing)
            self.run.close()
            self._clear(window.team)
        else:
            made = self.step(window.team, closing.factor, closing, window)
            refuse_nonfinite(made, self.settings.nonfinite)

    def step(self, team: Team, factor: float, closing: Closing, window: Window | None = None) -> Update:
        """Make the update with synchronised gradients, close the window, step the schedulers, and clear the gradients.

        Without a `window`, it is that of an earlier window, which is closed (`overlap`).
        """
        settings, scaler, optimizers = self.settings, self.scaler(), self.run.who.optimizers
        try:
            with stepping():
                try:
                    if window is not None and window.scale is not None and scaler is not None:
                        window.scale.correct(team.parameters, scaler)
                    made = step_optimizers(
                        optimizers,
                        scaler=scaler,
                        clip_norm=settings.clip_norm,
                        factor=factor,
                        nonfinite=settings.nonfinite,
                        spread=team.spread,
                    )
                except BaseException:
                    # The window stays open here, and is discarded. Other ranks may have closed theirs: the next table
                    # shows it, and all ranks raise.
                    if window is None:
                        self.run.take_back()
                    raise
                # If a scheduler fails, the update is made.
                self.reporter.note(made, closing)
                if window is not None:
                    self.run.close()
                if made.stepped:
                    move([one for ref in self.schedulers if (one := ref()) is not None], optimizers)
        finally:
            self._clear(team)
        return made

    def _clear(self, team: Team) -> None:
        zero(self.run.who.optimizers)
        for parameter in team.unowned:
            parameter.grad = None

    # -- with `overlap` ---------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Called when a call begins."""

    @property
    def lands_before_boundary(self) -> bool:
        """Whether an earlier window must land between the last micro-batch of this window and its boundary."""
        return False

    def go_on(self, index: int) -> None:
        """The open window has had `index` micro-batches."""

    def settle(self) -> None:
        """Wait for gradients that still travel, and make their update."""

    def go_back(self) -> None:
        """After an exception: put the last true parameters back, without waiting."""

    def abandon(self) -> bool:
        """The function or the program ends: keep the last true parameters. Returns whether an update was to be made."""
        return False
