"""`Record`: counters of a call and its last closed window, for `progress` and `on_update`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gradsync.decorator.progress import NO_UPDATE, Progress

if TYPE_CHECKING:
    from collections.abc import Callable

    from gradsync.functional import Closing, Run, Update


class Record:
    """The record of one (function, instance, optimizers). `run` counts windows; the rest is counted here."""

    def __init__(self, run: Run, on_update: Callable[..., Any] | None, instance: Callable[[], object]) -> None:
        """`instance()` is the first argument of `on_update` for a method; None for a plain function."""
        self._run = run
        self._on_update = on_update
        self._instance = instance
        self.is_telling = False  # whether `on_update` runs
        self.size = 0  # of the last window
        self.parts = 1  # with `fit`: the number of parts of the last call
        self.rows: int | None = None  # and the rows of the largest part
        self.begin_anew()

    def begin_anew(self) -> None:
        """Go back to before the first call."""
        self.num_steps = self.num_updates = self.num_skipped = self.num_replays = 0
        self._made = NO_UPDATE
        self._closing: Closing | None = None

    def note(self, made: Update, closing: Closing) -> None:
        """A window has closed, with the update `made`."""
        self.num_updates += made.stepped
        self.num_skipped += not made.stepped
        self._made, self._closing = made, closing

    def note_skipped(self, closing: Closing) -> None:
        """A window has closed without an update. With `overlap`, an earlier window may update in the same call."""
        self.num_skipped += 1
        self._closing = closing

    def note_held(self) -> None:
        """The current call has made no update so far."""
        if self._made.stepped:
            self._made = self._made._replace(stepped=False)

    @property
    def progress(self) -> Progress:
        """The current record."""
        run = self._run
        return Progress(
            micro_steps=self.num_steps,
            updates=self.num_updates,
            window=run.number,
            index=run.index,
            size=self.size if run.window is None else run.window.size,
            stepped=self._made.stepped,
            skipped=self.num_skipped,
            dropped=run.num_dropped,
            replays=self.num_replays,
            parts=self.parts,
            rows=self.rows,
            grad_norm=self._made.grad_norm,
            _closing=self._closing,
        )

    def tell(self) -> None:
        """Call the user's `on_update`, if the last call made an update."""
        if self._on_update is None or not self._made.stepped:
            return
        instance = self._instance()
        self.is_telling = True
        try:
            self._on_update(*(() if instance is None else (instance,)), self.progress)
        finally:
            self.is_telling = False
