"""The pure layer: arithmetic exhausted, tables to the bit, gradients against torch's own."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from gradsync import functional as F
from gradsync.functional._tally import Row, decode, encode, factor


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


counts = st.one_of(st.none(), st.integers(0, 2**53), st.floats(allow_nan=False, allow_infinity=False))


@given(st.lists(st.tuples(st.integers(0, 2**17), counts, st.booleans(), st.booleans()), min_size=1, max_size=5))
def test_a_table_survives_a_sum_in_float32(rows):
    """Averaged over the ranks in float32 and rounded, as it travels with gradients, it is exact to the last bit."""
    rows = [Row(n, None if c is None else float(c), m, f) for n, c, m, f in rows]
    size = len(rows)
    shares = [torch.tensor(encode(row, rank, size), dtype=torch.float32) / size for rank, row in enumerate(rows)]
    travelled = (torch.stack(shares).sum(0).double() * size).round().tolist()
    assert decode(travelled) == rows


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 100)), min_size=1, max_size=4), st.integers(1, 9))
def test_the_factor_makes_the_mean(ranks, planned):
    means = [Row(n, None, more=False) for n, _ in ranks]
    num = sum(n for n, _ in ranks)
    assert factor(means, planned) == (planned * len(ranks) / num if num else None)
    sums = [Row(n, float(c), more=False) for n, c in ranks]
    count = sum(c for n, c in ranks if n)
    assert factor(sums, planned) == (len(ranks) / count if count else None)


def test_lookahead():
    for n in range(5):
        assert list(F.lookahead(range(n))) == [(i, i == n - 1) for i in range(n)]


gradients = st.lists(
    st.one_of(st.none(), st.lists(st.floats(-1e3, 1e3, width=32), min_size=1, max_size=4)), min_size=1, max_size=5
)


def parameters_with(gradients, dtype=torch.float64):
    parameters = []
    for values in gradients:
        parameter = nn.Parameter(torch.zeros(len(values or [0]), dtype=dtype))
        parameter.grad = None if values is None else torch.tensor(values, dtype=dtype)
        parameters.append(parameter)
    return parameters


@given(gradients, st.floats(0.01, 100))
def test_clip_is_torchs(gradients, max_norm):
    mine, theirs = parameters_with(gradients), parameters_with(gradients)
    norm = F.clip(mine, max_norm)
    expected = torch.nn.utils.clip_grad_norm_(theirs, max_norm)
    assert norm.item() == pytest.approx(expected.item())
    for a, b in zip(mine, theirs):
        assert (a.grad is None) == (b.grad is None)
        if a.grad is not None:
            torch.testing.assert_close(a.grad, b.grad)


@given(gradients, st.floats(-3, 3))
def test_normalise(gradients, by):
    parameters = parameters_with(gradients)
    F.normalise(parameters, by)
    for parameter, values in zip(parameters, gradients):
        if values is not None:
            torch.testing.assert_close(parameter.grad, torch.tensor(values, dtype=torch.float64) * by)


@pytest.mark.parametrize("poison", [math.inf, -math.inf, math.nan])
def test_all_finite(poison):
    assert F.all_finite(parameters_with([[1.0], None, [2.0, 3.0]]))
    assert not F.all_finite(parameters_with([[1.0], [2.0, poison]]))
    huge = parameters_with([[3e38], [3e38]], torch.float32)  # their 2-norm overflows, they do not
    assert F.all_finite(huge)


def test_sparse_gradients():
    embedding = nn.Embedding(5, 2, sparse=True)
    dense = nn.Embedding(5, 2)
    dense.load_state_dict(embedding.state_dict())
    for one in (embedding, dense):
        one(torch.tensor([1, 1, 3])).square().sum().backward()
    assert F.norm(embedding.parameters()).item() == pytest.approx(F.norm(dense.parameters()).item())
    for one in (embedding, dense):
        F.normalise(one.parameters(), 0.25)
        F.clip(one.parameters(), 0.1)
    torch.testing.assert_close(embedding.weight.grad.to_dense(), dense.weight.grad)
    F.discard(embedding.parameters())
    assert embedding.weight.grad is None


def test_several_dtypes_at_once():
    parameters = [*parameters_with([[3.0]], torch.float32), *parameters_with([[4.0]], torch.bfloat16)]
    assert F.norm(parameters).item() == pytest.approx(5.0)
    F.normalise(parameters, 2.0)
    assert [p.grad.item() for p in parameters] == [6.0, 8.0]
