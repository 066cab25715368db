"""Losses that are sums over counts."""

from __future__ import annotations

import copy

import pytest
import torch

from gradsync import LossSum, accumulating
from tests.support.compare import assert_equal_updates
from tests.support.models import small_model
from tests.support.recorder import Recorder
from tests.support.reference import cut, micro_batch, sum_loss, train


def test_loss_sum_weighs_by_count():
    rows = [1, 5, 2, 4, 3]
    step = accumulating(steps=2)(lambda model, optimizer, x: LossSum(sum_loss(model, x), x.numel()))
    model = small_model()
    optimizer = Recorder(model.parameters())
    for i in step.over(range(5)):
        step(model, optimizer, micro_batch(0, i, rows[i]))

    def whole(model, window):
        xs = [micro_batch(0, i, rows[i]) for _, i in window]
        return sum_loss(model, torch.cat(xs)) / sum(x.numel() for x in xs)

    assert_equal_updates(optimizer.seen, train(small_model(), cut([5], 2), whole)[0])


@pytest.mark.parametrize("count", [lambda n: n, float, torch.tensor])
def test_counts_may_be_ints_floats_and_tensors_and_zero(count):
    step = accumulating(steps=2)(lambda model, optimizer, x, n: LossSum(sum_loss(model, x) * (n > 0), count(n)))
    model = small_model()
    optimizer = Recorder(model.parameters())
    step(model, optimizer, micro_batch(0, 0), 0)
    step(model, optimizer, micro_batch(0, 1), 12)
    before = copy.deepcopy(model.state_dict())
    step(model, optimizer, micro_batch(0, 0), 0)
    step(model, optimizer, micro_batch(0, 1), 0)  # counts that add up to zero: no update
    expected, _ = train(small_model(), [[(0, 1)]], lambda m, w: sum_loss(m, micro_batch(0, 1)) / 12)
    assert_equal_updates(optimizer.seen, expected)
    assert all(torch.equal(a, b) for a, b in zip(before.values(), model.state_dict().values(), strict=True))
    assert step.progress.skipped == 1 and step.progress.window == 2
