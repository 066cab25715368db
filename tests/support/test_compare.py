"""The comparator itself: what it must not take for something else."""

from __future__ import annotations

import math

import pytest
import torch

from tests.support.compare import assert_equal_state, assert_equal_updates, difference

ZEROS = torch.zeros(3, dtype=torch.float64)
NAN, INF = ZEROS + math.nan, ZEROS + math.inf


@pytest.mark.parametrize(
    ("got", "expected"),
    [
        (None, None), (ZEROS, ZEROS), (ZEROS + 1e-15, ZEROS), (ZEROS + 1 + 1e-13, ZEROS + 1), (NAN, NAN), (INF, INF),
        (torch.tensor([1.0, 1e-13 + 1e-14]), torch.tensor([1.0, 1e-14])),
    ],
)  # fmt: skip
def test_the_same(got, expected):
    assert difference(got, expected) is None


@pytest.mark.parametrize(
    ("got", "expected"),
    [
        (ZEROS + 5, ZEROS), (ZEROS + 1e-13, ZEROS), (None, ZEROS), (ZEROS, None), (ZEROS.float(), ZEROS), (ZEROS[:2], ZEROS),
        (ZEROS[None], ZEROS), (NAN, ZEROS), (ZEROS, NAN), (INF, ZEROS), (ZEROS, INF), (-INF, INF),
        (ZEROS + 1 + 1e-11, ZEROS + 1), (torch.tensor([2.0, math.inf]), torch.tensor([1.0, math.inf])),
    ],
)  # fmt: skip
def test_something_else(got, expected):
    assert difference(got, expected)


def test_nothing_is_left_out():
    with pytest.raises(AssertionError, match="1 updates instead of 2"):
        assert_equal_updates([[ZEROS]], [[ZEROS], [ZEROS]])
    with pytest.raises(AssertionError, match="update 0: 1 gradients instead of 2"):
        assert_equal_updates([[ZEROS]], [[ZEROS, ZEROS]])
    with pytest.raises(AssertionError, match="are not"):
        assert_equal_state({"a": ZEROS}, {"a": ZEROS, "b": ZEROS})
    with pytest.raises(AssertionError, match="a: 1 is not 2"):
        assert_equal_state({"a": 1}, {"a": 2})
    with pytest.raises(AssertionError, match="off by"):
        assert_equal_state({"a": ZEROS + 1 + 1e-15}, {"a": ZEROS + 1})
