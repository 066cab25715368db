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

    def expects(self, row: Row, rank: int, taken: int, size: int) -> bool:
        """Whether `row` is what `rank` is to bring to the coming window of `size`.

        >>> Plan([5, 8]).expects(Row(1, None, more=False), rank=0, taken=4, size=4)
        True
        """
        left = self.totals[rank] - taken
        return (
            row.num_micro_batches == max(0, min(size, left))
            and row.more == (left > size)
            and row.count is None
            and not row.void
        )

    def rows(self, taken: int, size: int) -> list[Row] | None:
        """What all are to bring; None if each brings a full window, and has more to come.

        >>> Plan([5, 8]).rows(taken=0, size=4)
        >>> [row.num_micro_batches for row in Plan([5, 8]).rows(taken=4, size=4)]
        [1, 4]
        """
        if min(self.totals) - taken > size:
            return None
        lefts = [total - taken for total in self.totals]
        nums = [int(max(0, min(size, left))) for left in lefts]
        return [
            Row(num, None, more=left > size, filled=num == size, called=num > 0)
            for num, left in zip(nums, lefts, strict=True)
        ]
