"""What each rank is to bring to each synchronisation of a loop, as their numbers of items tell beforehand."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from gradsync.functional._tally import Row

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, slots=True)
class Plan:
    """Of a loop with one micro-batch an item: full windows as long as a rank's items last, and then what is left.

    It is what ranks expect of each other, and not what they may rely on: a loop may pass over an item, or a length be
    wrong. `taken` below is how many micro-batches full windows have had up to now.
    """

    totals: Sequence[float]  # by rank: micro-batches that are held already and items to come; inf where nobody knows

    @classmethod
    def of(cls, held: Sequence[int], left: Sequence[int | None]) -> Plan:
        """What ranks that hold so many, and have so many items left, are to bring."""
        return cls([h + (float("inf") if n is None else n) for h, n in zip(held, left, strict=True)])

    def row(self, rank: int, taken: int, size: int) -> Row:
        """What `rank` is to bring to the coming window of `size`.

        >>> Plan([5, 8]).row(0, taken=4, size=4)
        Row(num_micro_batches=1, count=None, more=False, filled=False, void=False, called=True)
        """
        left = max(0, self.totals[rank] - taken)
        num = int(min(size, left))
        return Row(num, None, more=left > size, filled=num == size, called=num > 0)

    def rows(self, taken: int, size: int) -> list[Row] | None:
        """What all are to bring; None if each brings a full window, and has more to come.

        >>> Plan([5, 8]).rows(taken=0, size=4)
        >>> [row.num_micro_batches for row in Plan([5, 8]).rows(taken=4, size=4)]
        [1, 4]
        """
        if min(self.totals) - taken > size:
            return None
        return [self.row(rank, taken, size) for rank in range(len(self.totals))]
