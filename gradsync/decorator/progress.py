"""What `train_step.progress` is."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from gradsync.functional import Update

if TYPE_CHECKING:
    from gradsync.functional import Closing, Window

NO_UPDATE = Update(stepped=False, grad_norm=None)


class ClosedLosses:
    """The losses of the last closed window, as the backward saw them; their means when somebody asks."""

    __slots__ = ("_closing", "_count", "_losses")

    def __init__(self, window: Window, closing: Closing) -> None:
        self._losses = window.losses
        self._count = window.count
        self._closing = closing

    def mean(self) -> torch.Tensor | None:
        """This rank's mean on its device, or None if it had none."""
        if not self._losses:
            return None
        return torch.stack([loss.reshape(()) for loss in self._losses]).sum() / self._closing.own_divisor

    def mean_of_all(self) -> float | None:
        """All ranks' mean, where they have told each other."""
        return self._closing.mean_loss

    def count(self) -> float | None:
        """What this rank's losses were sums over."""
        return self._count.state() if self._closing.is_of_sums else None


@dataclass(frozen=True)
class Progress:
    """Where a decorated function stands; a record, not a view.

    - `micro_steps`: calls from the beginning. `replays` beside them are calls that were repeated for other ranks' sake.
    - `window`: how many windows have closed: `updates` of them with an update, `skipped` of them without.
    - `dropped`: micro-batches that `skip` has dropped.
    - `index`: how many micro-batches the open window has; 0 between windows. `size`: how many it, or else the last one,
      was planned to have.
    - `stepped`: whether the last call made an update.
    - `parts`: in how many the last call ran, with `fit`. `rows`: those of the largest part; None without `fit`, or
      where they are not known.
    - `grad_norm`: that of the last update, before clipping; None without `clip_norm`.
    - `loss`: this rank's mean over the last closed window, on its device. `count`: what its losses were sums over;
      None for means. `global_loss`: the mean over all ranks, in `.over` and with `LossSum`; else None.
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
    _losses: ClosedLosses | None = field(default=None, repr=False)

    @property
    def loss(self) -> torch.Tensor | None:
        """This rank's mean loss over the last closed window, on its device; nothing waits for it until it is read."""
        return None if self._losses is None else self._losses.mean()

    @property
    def global_loss(self) -> float | None:
        """The mean loss over all ranks in the last closed window; None where they have not told each other."""
        return None if self._losses is None else self._losses.mean_of_all()

    @property
    def count(self) -> float | None:
        """What this rank's losses of the last closed window were sums over, all together; None if they were means."""
        return None if self._losses is None else self._losses.count()
