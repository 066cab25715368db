"""`Share`: what one rank brings to a window, a row of the table that the ranks exchange."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from gradsync._loss import NO_LOSS, widest
from gradsync.functional._window.window import Window
from gradsync.ranks.meet import agreed
from gradsync.ranks.tables import Sent

NOBODY = -1.0  # in place of a key or a number: there is none
# In place of a number of items that are left:
UNKNOWN = math.inf
PERHAPS = 0.5  # there may be another call for the last item
ASKS = -1.0  # this rank does not know which window closes, and asks


class Share(NamedTuple):
    """What one rank brings to one window: numbers only, sent as a row of a table.

    Loops use the same row as a question before a micro-batch, and among the words at their first call.
    """

    num_micro_batches: float = 0.0  # that count in the mean
    num_calls: float = 0.0  # dropped ones included
    size: float = 0.0  # of the window as planned; 0 on a rank that has not opened it
    kind: float = NO_LOSS
    # The sum of the counts of its LossSums. (The ignores are there because a tuple has a method `count`.)
    count: float | torch.Tensor = 0.0  # type: ignore[assignment] # pyright: ignore[reportIncompatibleMethodOverride]
    loss: float | torch.Tensor | Sequence[torch.Tensor] = 0.0  # the sum of its losses, or those to be summed
    # 1 if a backward failed: all ranks drop the window. In a question, if tensor-parallel ranks contradict each other.
    failed: float | torch.Tensor = 0.0
    run_key: float = NOBODY  # of the run whose window closes or, in a question, that is called
    open: float = NOBODY  # the key of the first run of the loop with an open window here
    left: float = 0.0  # items still to come, or UNKNOWN, PERHAPS, ASKS
    once: float = 0.0  # 1 if its loop has called once for each item so far
    scale: float | torch.Tensor = 0.0  # of its GradScaler; 0 without one
    changes: float = NOBODY  # how often participants have changed since the loop began; NOBODY outside of loops
    number: float = NOBODY  # how many windows the rank has closed before; NOBODY on a rank that has not opened this one

    def row(self) -> list[float | torch.Tensor]:
        """Its numbers, in order."""
        return list(self._replace(loss=sum_of_losses(self.loss)))  # type: ignore[arg-type]

    @classmethod
    def of_window(cls, window: Window) -> Share:
        """What this rank has brought to its open window. A loop adds what it knows of the data."""
        return cls(
            num_micro_batches=float(window.num_micro_batches),
            num_calls=float(window.num_own),
            size=float(window.size),
            kind=window.kind,
            count=window.count.total,
            loss=window.losses if window.keeps_losses else math.nan,
            failed=float(window.failed),
            scale=0.0 if window.scale is None else window.scale.value,
            number=float(window.number),
        )

    @classmethod
    def of_row(cls, row: Sequence[float]) -> Share:
        """The share with these numbers.

        >>> Share.of_row(Share(num_micro_batches=4.0).row()).num_micro_batches
        4.0
        """
        return cls(*row)

    @property
    def filled(self) -> bool:
        """Whether the rank had its full number of calls."""
        return 0 < self.size <= self.num_calls


def shares_in(sent: Sent) -> list[Share]:
    """The shares of all ranks, in a table that was sent. Waits for it."""
    return [Share.of_row(row) for row in sent.rows()]


def insist_on_one_size(shares: Sequence[Share]) -> None:
    """Raise on every rank if the ranks planned windows of different sizes."""
    agreed([(rank, int(share.size)) for rank, share in enumerate(shares) if share.size], "number of steps in a window")


def sum_of_losses(loss: float | torch.Tensor | Sequence[torch.Tensor]) -> float | torch.Tensor:
    """The sum of losses, in float64 where the device has it. Most windows never read it, and so it is made late."""
    if isinstance(loss, int | float | torch.Tensor):
        return loss
    return torch.stack([one.reshape(()) for one in loss]).sum(dtype=widest(loss[0])) if loss else 0.0
