"""`factor_of`: the factor that makes the engines' average the mean of all that came; raises where ranks disagree."""

from __future__ import annotations

import math
from collections.abc import Sequence

from gradsync._errors import GradSyncError
from gradsync.functional._window.steps import correction
from gradsync.functional._window.table import IN_WORDS, NOBODY, PLAIN, SUMS, Share
from gradsync.ranks.meet import agreed, ranks_where


def factor_of(shares: Sequence[Share]) -> float | None:
    """The factor for the engines' average; None if there is nothing to average.

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
    if any(share.failed for share in shares):
        return None
    if kind == PLAIN:
        return 1.0
    if kind == SUMS:
        count = math.fsum([float(share.count) for share in shares])
        return len(shares) / count if count else None
    return correction(int(came[0].size), len(shares), int(sum([share.num_micro_batches for share in came])))


_MISSED = (
    "A boundary failed on the rank that has fewer, and the others have closed that window without it. Load a "
    "checkpoint on all ranks, or name that exception in skip=: then all ranks drop the window, and go on."
)


_REPLACED = (
    "A rank replaced a model, optimizer, scheduler or scaler in the middle of the loop. The rank with fewer changes "
    "had no items left, so that it never saw the new one. Replace them between loops, or change them in place."
)


def _insist_on_alike(shares: Sequence[Share]) -> None:
    """Raise if the ranks planned windows of different sizes, or returned different kinds of losses."""
    agreed([(r, int(share.size)) for r, share in enumerate(shares) if share.size], "number of steps in a window")
    numbers = [(rank, int(share.number)) for rank, share in enumerate(shares) if share.number != NOBODY]
    agreed(numbers, "number of closed windows", _MISSED)
    changes = [(rank, int(share.changes)) for rank, share in enumerate(shares) if share.changes != NOBODY]
    agreed(changes, "number of changes of participants in a loop", _REPLACED)
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
