"""`Place`: where a micro-batch stands in a window, and what this rank does there."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple


class Role(Enum):
    """What a rank does in a place of a window."""

    RUNS = "runs"  # a micro-batch of its own
    REPEATS = "repeats"  # its last micro-batch, without weight, because the other ranks wait in its forward
    MISSES = "misses"  # nothing, but for the synchronisation


RUNS = Role.RUNS  # asked in each call, where the attribute of an enum would cost more than the answer


class Place(NamedTuple):
    """The place of a micro-batch in a window. `size` is the planned number of micro-batches; a tail ends sooner."""

    window: int
    index: int  # type: ignore[assignment] # pyright: ignore[reportIncompatibleMethodOverride] # not the method of a tuple
    size: int
    last: bool
    role: Role = RUNS
