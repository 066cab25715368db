"""What `train_step.progress` is."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence


class ClosedLosses:
    """The losses of the last closed window, as the backward saw them; their mean when somebody asks."""

    __slots__ = ("_divisor", "_losses")

    def __init__(self, losses: Sequence[torch.Tensor], divisor: float | torch.Tensor) -> None:
        self._losses = losses
        self._divisor = divisor

    def mean(self) -> torch.Tensor | None:
        """Their mean on their device, or None if there were none."""
        if not self._losses:
            return None
        return torch.stack([loss.reshape(()) for loss in self._losses]).sum() / self._divisor


@dataclass(frozen=True)
class Progress:
    """Where a decorated function stands; a record, not a view.

    `micro_steps`, `updates`, `skipped` (windows without an update), `dropped` (micro-batches) and `replays` count from
    the beginning. `window` is the number of windows closed so far, `index` the number of micro-batches in the open one,
    and `size` what the open one, or else the last, was planned to have. `stepped` tells whether the last call made an
    update.
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
    grad_norm: torch.Tensor | None = None
    _losses: ClosedLosses | None = field(default=None, repr=False)

    @property
    def loss(self) -> torch.Tensor | None:
        """This rank's mean loss over the last closed window, on its device; nothing waits for it until it is read."""
        return None if self._losses is None else self._losses.mean()
