"""`Progress`, the type of `train_step.progress`, and `Reporter`, which counts it and calls `on_update`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch

from gradsync.functional import Closing, Run, Update


@dataclass(frozen=True)
class Progress:
    """The state of a decorated function: a frozen record, which does not change with later calls.

    - `micro_steps`: the number of calls. `replays`: calls that were repeated where other ranks waited in their forward,
      because they had more data or because `skip` dropped one here; not counted in `micro_steps`.
    - `window`: the number of closed windows. `updates`: those with an update; `skipped`: those without.
    - `dropped`: micro-batches that `skip` has dropped.
    - `index`: the number of micro-batches in the open window, dropped ones too; 0 between windows. `size`: the planned
      number, of the open window or else of the last.
    - `stepped`: whether the last call made an update.
    - `parts`: with `fit`, the number of parts in which the last call ran. `rows`: the rows of the largest part; None
      without `fit`, or if not known.
    - `grad_norm`: the norm of the gradients of the last closed window, before clipping; None without `clip_norm`, or
      where that window had nothing to average.
    - `loss`: this rank's mean over the last closed window, on its device. `count`: the sum of its counts; None if its
      losses were means. `global_loss`: the mean over all ranks, where a table travels: in `.over`, with `LossSum`, with
      `skip`, and with a function for `steps`; else None.
    """

    micro_steps: int = 0
    updates: int = 0
    window: int = 0
    index: int = 0
    size: int = 0
    stepped: bool = False
    skipped: int = 0
    dropped: int = 0
    replays: int = 0
    parts: int = 1
    rows: int | None = None
    grad_norm: torch.Tensor | None = None
    _closing: Closing | None = field(default=None, repr=False, compare=False, kw_only=True)

    @property
    def loss(self) -> torch.Tensor | None:
        """This rank's mean loss over the last closed window, on its device. The host waits when you read its value."""
        return None if self._closing is None else self._closing.own_mean_loss

    @property
    def global_loss(self) -> float | None:
        """The mean loss over all ranks in the last closed window; None if the ranks sent no table."""
        return None if self._closing is None else self._closing.mean_loss

    @property
    def count(self) -> float | None:
        """The sum of this rank's counts in the last closed window; None if its losses were means."""
        return None if self._closing is None else self._closing.own_count


class Reporter:
    """What one (function, instance, optimizers) has counted, in `now`: the fields of `Progress`, which change here.

    Windows and dropped micro-batches are counted by the `run`.
    """

    def __init__(self, run: Run, on_update: Callable[..., Any] | None, instance: Callable[[], object]) -> None:
        """`instance()` is the first argument of `on_update` for a method; None for a plain function."""
        self._run = run
        self._on_update = on_update
        self._instance = instance
        self.is_in_on_update = False  # whether `on_update` runs
        self._is_due = False  # whether it is to run for the last update
        self.go_on_from(Progress())

    def go_on_from(self, progress: Progress) -> None:
        """Count on from these numbers."""
        self.now = SimpleNamespace(**vars(progress))
        self._run.go_on_from(progress.window, progress.dropped)

    def begin(self) -> None:
        """A call begins, which has made no update so far."""
        self.now.stepped = self._is_due = False

    def note(self, made: Update, closing: Closing) -> None:
        """A window has closed, with the update `made`. With `overlap`, an earlier one may come in the same call."""
        now, stepped = self.now, made.stepped
        now.updates += stepped
        now.skipped += not stepped
        now.stepped, self._is_due = now.stepped or stepped, stepped
        now.grad_norm, now._closing = made.grad_norm, closing

    @property
    def progress(self) -> Progress:
        """The current record."""
        run = self._run
        by_run: dict[str, Any] = {"window": run.number, "index": run.index, "dropped": run.num_dropped}
        return Progress(**(vars(self.now) | by_run))

    def call_on_update(self) -> None:
        """Call the user's `on_update`, once for an update of the last call.

        If it lands another one itself (`settle`, `state_dict`), that has its turn as it returns.
        """
        if self._on_update is None or self.is_in_on_update or not self._is_due:
            return
        instance = self._instance()
        self.is_in_on_update, self._is_due = True, False
        try:
            self._on_update(*(() if instance is None else (instance,)), self.progress)
        finally:
            self.is_in_on_update = False
            self.call_on_update()
