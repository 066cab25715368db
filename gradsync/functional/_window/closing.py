"""`Closing`: what came to a window from all ranks as it closes, and the factor that makes the mean of it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from gradsync._errors import GradSyncError
from gradsync._loss import IN_WORDS, PLAIN, SUMS, Count
from gradsync.functional._window.share import NOBODY, Share, insist_on_one_size, sum_of_losses
from gradsync.functional._window.terms import Tail, correction
from gradsync.ranks.meet import agreed, ranks_where
from gradsync.ranks.tables import Sent


class Closing(NamedTuple):
    """What came to a window that closes: the shares by rank, and the factor for the gradients.

    Multiplied by `factor`, the engines' average over the ranks is the mean over all micro-batches (or counts). `factor`
    is None if there is nothing to average, or if it is a tail that is dropped; then make no update. `rank` is this
    rank's own place in `shares`.
    """

    shares: tuple[Share, ...]
    rank: int
    factor: float | None
    was_sent: bool  # whether the shares are what each rank said, not inferred from this rank's own
    own_losses: Sequence[torch.Tensor]  # of this rank's micro-batches
    own_counts: Count  # what they were sums over, exactly
    failures: Sent | None = None  # flags of ranks that failed after the table, not read yet

    @property
    def has_failed(self) -> bool:
        """Whether a rank failed after the table. Waits for what the ranks have said of that."""
        return self.failures is not None and any(row[0] for row in self.failures.rows())

    def without_factor(self) -> Closing:
        """The same, without an update."""
        return self._replace(factor=None)

    @property
    def had_calls(self) -> bool:
        """Whether any rank had a call at all."""
        return any(share.num_calls for share in self.shares)

    @property
    def own_divisor(self) -> float | torch.Tensor:
        """The divisor that makes the sum of this rank's losses their mean."""
        share = self.shares[self.rank]
        return share.count if share.kind == SUMS else share.num_micro_batches

    @property
    def own_mean_loss(self) -> torch.Tensor | None:
        """This rank's mean loss, on its device; None if it had no loss, or if its counts add up to zero."""
        if not self.own_losses or (isinstance(self.own_divisor, float) and not self.own_divisor):
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

        The backward of a mean began with one over the window's size, that of a `LossSum` with 1.
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


def factor_of(shares: Sequence[Share], tail: Tail) -> float | None:
    """The factor for the engines' average; None if there is nothing to average, or if it is a tail that is dropped.

    Raises on every rank if the shares, of all ranks, do not fit together.
    """
    if len(shares) > 1:
        _insist_on_alike(shares)
    came = [share for share in shares if share.num_micro_batches]
    if not came:
        return None
    kind = came[0].kind
    if kind == SUMS:
        _insist_on_counts(shares)
    if any(share.failed for share in shares) or is_dropped_tail(shares, tail):
        return None
    if kind == PLAIN:
        return 1.0
    if kind == SUMS:
        count = math.fsum([float(share.count) for share in shares])
        return len(shares) / count if count else None
    return correction(int(came[0].size), len(shares), int(sum([share.num_micro_batches for share in came])))


def is_dropped_tail(shares: Sequence[Share], tail: Tail) -> bool:
    """Whether a window is a tail, which no rank filled, and is discarded."""
    return tail == "drop" and not any(share.filled for share in shares)


_MISSED = (
    "A boundary failed on the rank that has fewer, and the others have closed that window without it. Load a "
    "checkpoint on all ranks, or name that exception in skip=: then all ranks drop the window, and go on."
)


_REPLACED = (
    "A rank replaced a model, optimizer, scheduler or scaler in the middle of the loop. The rank with fewer changes "
    "had no items left, so that it never saw the new one. Replace them between loops, or change them in place."
)


def _insist_on_alike(shares: Sequence[Share]) -> None:
    """Raise if the ranks differ in the window's size or number, in replacements, in scale or in the kind of loss."""
    insist_on_one_size(shares)
    numbers = [(rank, int(share.number)) for rank, share in enumerate(shares) if share.number != NOBODY]
    agreed(numbers, "number of closed windows", _MISSED)
    changes = [(rank, int(share.changes)) for rank, share in enumerate(shares) if share.changes != NOBODY]
    agreed(changes, "number of times that a participant was replaced in the loop", _REPLACED)
    came = [(rank, share) for rank, share in enumerate(shares) if share.num_micro_batches]
    scales = [(rank, float(share.scale)) for rank, share in came]
    agreed(scales, "scale of the GradScaler", "Load its state on all ranks, or on none.")
    kinds = [(rank, IN_WORDS[share.kind]) for rank, share in came]
    agreed(kinds, "kind of loss in a window", "Return a LossSum everywhere, or nowhere.")


def _insist_on_counts(shares: Sequence[Share]) -> None:
    odd = ranks_where(not 0 <= float(share.count) < math.inf for share in shares)
    if odd:
        raise GradSyncError(
            "The count of a LossSum must be a finite number, and not negative, but a count of rank "
            f"{odd} in this window is negative, infinite or NaN. Count what the loss is a sum over: tokens, pixels, "
            "rows."
        )
