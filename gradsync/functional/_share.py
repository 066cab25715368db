"""What each rank brings to a window, and what all of it together comes to."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING

import torch

from gradsync._errors import GradSyncError
from gradsync.functional._count import is_count
from gradsync.functional._steps import correction
from gradsync.ranks.meet import agreed, ranks_where

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gradsync.ranks.line import Sent

NOTHING, MEANS, SUMS, PLAIN = 0.0, 1.0, 2.0, 3.0  # the kinds of losses
IN_WORDS = {NOTHING: None, MEANS: "a mean", SUMS: "a LossSum", PLAIN: "a plain backward"}
NOBODY = -1.0


@dataclass(frozen=True, slots=True)
class Share:
    """What one rank brings to one window: numbers all, to be sent as a row of a table."""

    num_micro_batches: float = 0.0  # those that weigh
    num_calls: float = 0.0  # dropped ones included
    size: float = 0.0  # how many it was planned to have; 0 from a rank that has opened none
    kind: float = NOTHING
    count: float | torch.Tensor = 0.0  # what its LossSums were sums over
    loss: float | torch.Tensor | Sequence[torch.Tensor] = 0.0  # the sum of its losses, or those to be summed
    failed: float | torch.Tensor = 0.0  # whether a backward failed, so that all ranks must drop the window
    closing: float = NOBODY  # which of its loop's windows it must close
    open: float = NOBODY  # the first of its loop's windows that is open here
    left: float = 0.0  # items still to come; inf where that is not known
    once: float = 0.0  # whether its loop has been seen to call once an item

    def row(self) -> list[float | torch.Tensor]:
        """Its numbers, in order."""
        return [_summed(self.loss) if name == "loss" else getattr(self, name) for name in _NAMES]

    @classmethod
    def of(cls, row: Sequence[float]) -> Share:
        """The share with these numbers.

        >>> Share.of(Share(num_micro_batches=4.0).row()).num_micro_batches
        4.0
        """
        return cls(*row)

    @property
    def filled(self) -> bool:
        """Whether the rank had its full number of calls."""
        return 0 < self.size <= self.num_calls


_NAMES = tuple(field.name for field in fields(Share))


@dataclass(frozen=True)
class Closing:
    """What came to a window that closes: all ranks' shares in their order, and what that makes of the gradients.

    `factor` is what makes the engine's average over the ranks the mean over all that came; None if nothing is to be
    averaged, and no update made. `rank` is this one's place.
    """

    shares: tuple[Share, ...]
    rank: int
    factor: float | None
    is_told: bool = True  # whether these are the ranks' own words, and not what must be
    failures: Sent | None = None  # which ranks have failed since, where nobody has waited for that yet

    @classmethod
    def of(cls, shares: Sequence[Share], rank: int, *, is_told: bool = True) -> Closing:
        """Of a window to which each rank brings its share. Raises on every rank if these do not fit together."""
        return cls(tuple(shares), rank, _factor(shares), is_told)

    def without(self) -> Closing:
        """The same, with nothing to average: a rank has failed since."""
        return replace(self, factor=None)

    @property
    def filled(self) -> bool:
        """Whether any rank had its full number of calls: else this is a tail."""
        return any(share.filled for share in self.shares)

    @property
    def is_window(self) -> bool:
        """Whether any rank had a call at all."""
        return any(share.num_calls for share in self.shares)

    @property
    def own_divisor(self) -> float | torch.Tensor:
        """What the sum of this rank's losses is to be divided by to be their mean."""
        share = self.shares[self.rank]
        return share.count if share.kind == SUMS else share.num_micro_batches

    @property
    def own_factor(self) -> float | None:
        """What makes the sum of this rank's own gradients their mean; None if they weigh nothing.

        A loss that is a mean was divided by the planned size before its backward, and a sum by nothing.
        """
        share, over = self.shares[self.rank], float(self.own_divisor)
        return (1.0 if share.kind == SUMS else share.size) / over if over else None

    @property
    def is_of_sums(self) -> bool:
        """Whether the losses were sums, on the ranks that had any."""
        return any(share.kind == SUMS for share in self.shares)

    @property
    def mean_loss(self) -> float | None:
        """The mean loss over all that came to the window, from all ranks; None if nothing did, or nobody has said."""
        if not self.is_told:
            return None
        over = math.fsum(float(s.count if self.is_of_sums else s.num_micro_batches) for s in self.shares)
        return sum(float(_summed(share.loss)) for share in self.shares) / over if over else None


def _summed(loss: float | torch.Tensor | Sequence[torch.Tensor]) -> float | torch.Tensor:
    """Losses are added up where somebody asks, which in most windows nobody does."""
    if isinstance(loss, float | torch.Tensor):
        return loss
    return torch.stack([one.reshape(()) for one in loss]).sum() if loss else 0.0


def _factor(shares: Sequence[Share]) -> float | None:
    """What to multiply the engine's average by; None if there is nothing to average."""
    if len({share.size for share in shares if share.size}) > 1:
        agreed([(r, int(share.size)) for r, share in enumerate(shares) if share.size], "number of steps in a window")
    came = [share for share in shares if share.num_micro_batches]
    if len({share.kind for share in came}) > 1:
        returned = ((rank, share.kind) for rank, share in enumerate(shares) if share.num_micro_batches)
        raise GradSyncError(
            "All ranks must return the same kind of loss in a window, but "
            + ", ".join(f"rank {rank} returned {IN_WORDS[kind]}" for rank, kind in returned)
            + ". Return a LossSum everywhere, or nowhere."
        )
    if not all(is_count(float(share.count)) for share in shares):
        odd = ranks_where(not is_count(float(share.count)) for share in shares)
        raise GradSyncError(
            "The count of a LossSum must be a finite number, and not negative, but a count of rank "
            f"{odd} in this window is negative, infinite or NaN. Count what the loss is a sum over: tokens, pixels, "
            "rows."
        )
    if not came or any(share.failed for share in shares):
        return None
    if came[0].kind == PLAIN:
        return 1.0
    if came[0].kind == SUMS:
        count = math.fsum(float(share.count) for share in shares)
        return len(shares) / count if count else None
    return correction(int(came[0].size), len(shares), int(sum(share.num_micro_batches for share in came)))
