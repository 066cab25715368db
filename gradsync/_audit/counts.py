"""What an audit counts: plain numbers, and moments, which may be torch's events."""

from __future__ import annotations

import time
from collections import Counter, defaultdict, deque
from dataclasses import dataclass, field
from typing import Any, Literal

Wasted = Literal["not held", "forward not held", "not held, sharded", "left by another optimizer's backward"]
Missed = Literal["no engine", "held", "too early", "flag after forward", "bypassed", "held, sharded"]

# Enough for a steady median; of a longer loop, the last are kept.
_KEPT = 512


@dataclass(eq=False)
class Stretch:
    """The moments of one backward: its first gradient, the end of computing, and the end of the reduction."""

    engines: frozenset[int]
    began: Any
    computed: Any
    ended: Any
    wasted: bool = False


@dataclass
class Times:
    """The backwards that reached the same engines, by what they did there."""

    synchronised: deque[Stretch] = field(default_factory=lambda: deque(maxlen=_KEPT))
    held: deque[Stretch] = field(default_factory=lambda: deque(maxlen=_KEPT))
    # Backwards, not synchronisations: one may have synchronised several engines.
    num_wasted: int = 0


@dataclass
class Counts:
    """The numbers behind a report, updated by the watch."""

    rank: int = 0
    ranks: int = 1
    backwards: int = 0
    syncs: int = 0
    updates: int = 0
    bytes: int = 0
    discarded: int = 0
    wasted: Counter[Wasted] = field(default_factory=Counter)
    missed: Counter[Missed] = field(default_factory=Counter)
    times: defaultdict[frozenset[int], Times] = field(default_factory=lambda: defaultdict(Times))
    began: float = field(default_factory=time.perf_counter)
