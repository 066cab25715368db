"""What each rank brings to a window, and the table of all of them.

A row is written as seven small whole numbers, below 2**20 and so exact in any float that gradients come in, summed and
averaged. That is why a table can travel inside the gradients' own collective.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gradsync._errors import GradSyncError
from gradsync.engines import TABLE_WIDTH
from gradsync.functional._agreement import ONE_FORWARD, agreed, ranks_where
from gradsync.functional._window import correction

if TYPE_CHECKING:
    from collections.abc import Sequence

_CHUNK = 1 << 18
_NO_COUNT = 4096  # no exponent of a float64 comes near it


@dataclass(frozen=True, slots=True)
class Row:
    """What one rank brings to one window."""

    num_micro_batches: int
    count: float | None  # what its LossSums were sums over; None if its losses were means
    more: bool  # whether it may have a micro-batch in the next window
    filled: bool = False  # whether it had its full share of calls, dropped ones included
    void: bool = False  # whether a backward failed, so that all ranks must drop the window
    called: bool = True  # whether it had any call, dropped ones included
    size: int = 0  # how many micro-batches it was planned to have on this rank, where that is told


def encode(row: Row, rank: int, num_ranks: int) -> list[float]:
    """The table that holds only this rank's row; summed over the ranks it is the whole."""
    table = [0.0] * (TABLE_WIDTH * num_ranks)
    fraction, exponent = (0.0, _NO_COUNT) if row.count is None else math.frexp(row.count)
    chunks = []
    for _ in range(3):  # 3 times 18 bits hold the 53 of a float64
        fraction *= _CHUNK
        chunks.append(float(int(fraction)))
        fraction -= int(fraction)
    table[TABLE_WIDTH * rank : TABLE_WIDTH * (rank + 1)] = [
        row.num_micro_batches, row.more + 2 * row.filled + 4 * row.void + 8 * row.called,
        exponent, *chunks, row.size,
    ]  # fmt: skip
    return table


def decode(table: Sequence[float]) -> list[Row]:
    """All ranks' rows.

    >>> decode(encode(Row(4, 0.1, more=True), rank=0, num_ranks=1))
    [Row(num_micro_batches=4, count=0.1, more=True, filled=False, void=False, called=True, size=0)]
    """
    rows = []
    for start in range(0, len(table), TABLE_WIDTH):
        num, flags, exponent, *chunks, size = table[start : start + TABLE_WIDTH]
        fraction = sum(chunk / _CHUNK**place for place, chunk in enumerate(chunks, start=1))
        count = None if exponent == _NO_COUNT else math.ldexp(fraction, int(exponent))
        said = int(flags)
        flag = {name: bool(said & bit) for name, bit in (("more", 1), ("filled", 2), ("void", 4), ("called", 8))}
        rows.append(Row(int(num), count, **flag, size=int(size)))
    return rows


def agree_on_sizes(sizes: Sequence[int]) -> None:
    """Raise if the ranks, in their order, planned a window with different numbers of micro-batches."""
    agreed(list(enumerate(sizes)), "number of steps in a window")


def check_twins(differ: Sequence[bool]) -> None:
    """Raise if ranks, in the order of the data-parallel ones, have found that their twins have other micro-batches."""
    ranks = ranks_where(differ)
    if ranks:
        raise GradSyncError(
            f"All ranks of a tensor-parallel group must come to the same micro-batches, but those of data-parallel "
            f"rank {ranks} do not: some have one, or more of them, and others not. {ONE_FORWARD}"
        )


def factor(rows: Sequence[Row], planned: int) -> float | None:
    """What to multiply the engine's average by; None if the window holds nothing to average, and makes no update."""
    agree_on_sizes([row.size for row in rows])
    came = [(rank, row) for rank, row in enumerate(rows) if row.num_micro_batches]
    if any(row.void for row in rows):
        return None
    kinds = {row.count is None for _, row in came}
    if len(kinds) > 1:
        raise GradSyncError(
            "All ranks must return the same kind of loss in a window, but "
            + ", ".join(f"rank {rank} returned {'a mean' if row.count is None else 'a LossSum'}" for rank, row in came)
            + ". Return a LossSum everywhere, or nowhere."
        )
    if not came:
        return None
    if True in kinds:
        return correction(planned, len(rows), sum(row.num_micro_batches for _, row in came))
    count = math.fsum(row.count or 0.0 for _, row in came)
    return len(rows) / count if count else None
