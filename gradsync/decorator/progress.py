"""`Progress`: the type of `train_step.progress`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from gradsync.functional import Update

if TYPE_CHECKING:
    import torch

    from gradsync.functional import Closing

NO_UPDATE = Update(stepped=False, grad_norm=None)


@dataclass(frozen=True)
class Progress:
    """The state of a decorated function: a frozen record, which does not change with later calls.

    - `micro_steps`: the number of calls. `replays`: calls that were repeated because other ranks had more data, not
      counted in `micro_steps`.
    - `window`: the number of closed windows. `updates`: those with an update; `skipped`: those without.
    - `dropped`: micro-batches that `skip` has dropped.
    - `index`: the number of micro-batches in the open window; 0 between windows. `size`: the planned number, of the
      open window or else of the last.
    - `stepped`: whether the last call made an update.
    - `parts`: with `fit`, the number of parts in which the last call ran. `rows`: the rows of the largest part; None
      without `fit`, or if not known.
    - `grad_norm`: the norm of the last update's gradients, before clipping; None without `clip_norm`.
    - `loss`: this rank's mean over the last closed window, on its device. `count`: the sum of its counts; None if its
      losses were means. `global_loss`: the mean over all ranks, in `.over` and with `LossSum`; else None.
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
    _closing: Closing | None = field(default=None, repr=False)

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
