"""What is done to gradients, against torch's own."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from gradsync import functional as F

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
    for a, b in zip(mine, theirs, strict=True):
        assert (a.grad is None) == (b.grad is None)
        if a.grad is not None:
            torch.testing.assert_close(a.grad, b.grad)


@given(gradients, st.floats(-3, 3))
def test_normalise(gradients, by):
    parameters = parameters_with(gradients)
    F.normalise(parameters, by)
    for parameter, values in zip(parameters, gradients, strict=True):
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
