"""Comparing what came with what had to come: number, None, shape, type and value, each of which must be right."""

from __future__ import annotations

from gradsync.verify.compare import assert_equal_state, assert_equal_states, difference  # noqa: F401


def assert_equal_updates(seen, expected, tolerance: float = 1e-12) -> None:
    """Two lists of updates, each a list of gradients by parameter."""
    assert len(seen) == len(expected), f"{len(seen)} updates instead of {len(expected)}"
    for number, (mine, right) in enumerate(zip(seen, expected, strict=True)):
        assert len(mine) == len(right), f"update {number}: {len(mine)} gradients instead of {len(right)}"
        for place, (x, y) in enumerate(zip(mine, right, strict=True)):
            wrong = difference(x, y, tolerance)
            assert wrong is None, f"update {number}, parameter {place}: {wrong}"
