"""A micro-batch's place: where it stands in its window, and what this rank does there."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Part(Enum):
    """What a rank does in a place of a window."""

    RUNS = "runs"  # a micro-batch of its own
    REPEATS = "repeats"  # a micro-batch that it ran before, without weight: the others wait in its forward
    MISSES = "misses"  # nothing but the synchronisation


@dataclass(frozen=True, slots=True)
class Place:
    """One micro-batch's place. `size` is what the window was planned to have; a tail ends sooner."""

    window: int
    index: int
    size: int
    last: bool
    part: Part = Part.RUNS
