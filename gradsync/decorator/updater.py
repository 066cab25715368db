"""`Updater`: makes the update of a window as it closes, from the gradients' normalisation to the schedulers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.amp import GradScaler

from gradsync._step_hook import stepping
from gradsync.decorator.participants import reference
from gradsync.decorator.progress import Reporter
from gradsync.decorator.settings import Settings
from gradsync.functional import Closing, Run, Update, Window, update

NO_UPDATE = Update(stepped=False, grad_norm=None)


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
        if closing.factor is None:
            self.reporter.note(NO_UPDATE, closing)
            self.run.close()
        else:
            self.step(self.run.open_window, closing, self.run.close)

    def step(self, window: Window, closing: Closing, close: Callable[[], object]) -> None:
        """Make the update with synchronised gradients. Its window is closed by `close`, before the schedulers step.

        If an optimizer fails, the window stays open here, and is discarded. Other ranks may have closed theirs: the
        next table shows it, and all ranks raise. If a scheduler fails, the update is made.
        """
        settings, team = self.settings, window.team
        assert closing.factor is not None, "there is something to average"

        def then(made: Update) -> None:
            self.reporter.note(made, closing)
            close()

        try:
            with stepping():
                update(
                    self.run.who.optimizers,
                    schedulers=[one for ref in self.schedulers if (one := ref()) is not None],
                    scaler=self.scaler(),
                    clip_norm=settings.clip_norm,
                    factor=closing.factor,
                    nonfinite=settings.nonfinite,
                    spread=team.spread,
                    then=then,
                )
        finally:
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

    def settle_quietly(self) -> Exception | None:
        """The same where an error of the update is not to be raised: the next landing raises it. Returns it."""
        return None

    def go_back(self) -> None:
        """After an exception: put the last true parameters back, without waiting."""

    def abandon(self) -> str | None:
        """The function or the program ends: keep the last true parameters. Returns what to warn of."""
        return None
