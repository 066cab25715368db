"""`Closing`: what came to a window from all ranks as it closes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from gradsync.functional._window.loss_sum_count import Count
from gradsync.functional._window.table import SUMS, Share, sum_of_losses
from gradsync.ranks.line import Sent


class Closing(NamedTuple):
    """What came to a window that closes: the shares by rank, and the factor for the gradients.

    Multiplied by `factor`, the engines' average over the ranks is the mean over all micro-batches (or counts). It is
    None if there is nothing to average; then make no update. `rank` is this rank's own place in `shares`.
    """

    shares: tuple[Share, ...]
    rank: int
    factor: float | None
    was_sent: bool  # whether the shares were sent, not inferred from this rank's own
    own_losses: Sequence[torch.Tensor]  # of this rank's micro-batches
    own_counts: Count  # what they were sums over, exactly
    failures: Sent | None = None  # flags of ranks that failed after the table, not read yet

    def without(self) -> Closing:
        """The same, with nothing to average: a rank failed after the table."""
        return self._replace(factor=None)

    @property
    def filled(self) -> bool:
        """Whether any rank had its full number of calls; otherwise the window is a tail."""
        return any(share.filled for share in self.shares)

    @property
    def is_window(self) -> bool:
        """Whether any rank had a call at all."""
        return any(share.num_calls for share in self.shares)

    @property
    def own_divisor(self) -> float | torch.Tensor:
        """The divisor that makes the sum of this rank's losses their mean."""
        share = self.shares[self.rank]
        return share.count if share.kind == SUMS else share.num_micro_batches

    @property
    def own_mean_loss(self) -> torch.Tensor | None:
        """This rank's mean loss, on its device; None if it had no loss."""
        if not self.own_losses:
            return None
        total = sum_of_losses(self.own_losses)
        assert isinstance(total, torch.Tensor), "there are losses"
        mean: torch.Tensor = total / self.own_divisor
        return mean.to(torch.promote_types(self.own_losses[0].dtype, torch.float32))

    @property
    def own_count(self) -> float | None:
        """The exact sum of this rank's counts; None for means. Waits for the device."""
        return self.own_counts.state() if self.is_of_sums else None

    @property
    def own_factor(self) -> float | None:
        """The factor that makes this rank's own gradients their mean; None if they weigh nothing.

        The loss of a mean was divided by the window's size before its backward; a `LossSum` was not.
        """
        share, over = self.shares[self.rank], float(self.own_divisor)
        return (1.0 if share.kind == SUMS else share.size) / over if over else None

    @property
    def is_of_sums(self) -> bool:
        """Whether the losses were `LossSum`s."""
        return any(share.kind == SUMS for share in self.shares)

    @property
    def mean_loss(self) -> float | None:
        """The mean loss over all ranks; None if there was none, or if the ranks sent no table."""
        if not self.was_sent:
            return None
        over = math.fsum(float(s.count if self.is_of_sums else s.num_micro_batches) for s in self.shares)
        return sum(float(sum_of_losses(share.loss)) for share in self.shares) / over if over else None
