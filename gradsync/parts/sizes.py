"""Remembers the size that fits for each shape of call, and tries a larger one now and then."""

from __future__ import annotations

import logging
import math
from collections.abc import Hashable
from dataclasses import dataclass, replace

_PATIENCE = 64  # calls in parts, before a larger size is tried
_MOST_PATIENCE = 4096
_MOST_SHAPES = 256  # that are remembered: sequences may have any length

_log = logging.getLogger("gradsync")


@dataclass(frozen=True)
class Size:
    """What fits, for one shape of calls."""

    limit: float  # rows that a part may have; a share of the call if rows are not known
    calls: int = 0  # that ran in parts since the limit was found
    patience: int = _PATIENCE

    @property
    def is_trial(self) -> bool:
        """Whether the next call tries twice the limit."""
        return self.calls >= self.patience


class Sizes:
    """Sizes that fit, for calls of several shapes; empty until something did not fit."""

    def __init__(self) -> None:
        self._sizes: dict[Hashable, Size] = {}

    def __bool__(self) -> bool:
        return bool(self._sizes)

    def parts(self, shape: Hashable, rows: float) -> int:
        """The number of parts in which a call should run."""
        size = self._sizes.get(shape)
        if size is None:
            return 1
        return math.ceil(rows / (2 * size.limit if size.is_trial else size.limit))

    def ran(self, shape: Hashable, rows: float, largest: float, failed: float, name: str) -> None:
        """A call of `rows` ran in parts of at most `largest`, after parts of `failed` did not fit (inf: none)."""
        before = self._sizes.get(shape)
        if failed < math.inf:
            if before is not None and failed > before.limit:  # a trial failed: wait longer for the next
                after = Size(before.limit, patience=min(2 * before.patience, _MOST_PATIENCE))
            else:
                after = Size(largest)
                _log.warning("%s ran out of memory with %s, and goes on with %s", name, _of(failed), _of(largest))
            self._sizes.pop(shape, None)
            self._sizes[shape] = after
            if len(self._sizes) > _MOST_SHAPES:
                del self._sizes[next(iter(self._sizes))]
        elif before is not None and largest > before.limit:
            _log.info("%s fits in memory with %s again", name, _of(largest))
            self._sizes[shape] = Size(largest)
        elif before is not None and rows > before.limit:
            self._sizes[shape] = replace(before, calls=before.calls + 1)


def _of(size: float) -> str:
    if size < 1:
        return f"1/{1 / size:g} of a call"
    return "1 row" if size == 1 else f"{size:g} rows"
