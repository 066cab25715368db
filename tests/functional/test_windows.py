"""The arithmetic of windows, exhausted."""

from __future__ import annotations

import pytest

from gradsync import functional as F


@pytest.mark.parametrize("steps", range(1, 7))
@pytest.mark.parametrize("length", range(13))
def test_sizes(length, steps):
    sizes = list(F.sizes(length, steps))
    assert sum(sizes) == length and all(size == steps for size in sizes[:-1]) and len(sizes) == -(-length // steps)


def test_sizes_of_a_function():
    assert list(F.sizes(10, lambda window: 1 + window)) == [1, 2, 3, 4]
    assert F.window_size(lambda window: 2 * window + 1, 3) == 7


def test_correction_is_one_for_every_full_window():
    for planned in range(1, 65):
        for num_ranks in range(1, 33):
            assert F.correction(planned, num_ranks, planned * num_ranks) == 1.0


@pytest.mark.parametrize("n", range(5))
def test_the_last_item_is_known_and_nothing_drawn_ahead_where_the_length_is(n):
    for items in (range(n), iter(range(n))):
        assert list(F.with_last(items)) == [(i, i == n - 1) for i in range(n)]
