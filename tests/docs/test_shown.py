"""The example of CONTRIBUTING.md: a test there holds the two together."""

from __future__ import annotations

import torch
import torch.distributed as dist

import gradsync
from tests.support.compare import assert_equal_state
from tests.support.models import small_model
from tests.support.reference import mean_loss, micro_batch, states, window_mean


def two_micro_batches():
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    @gradsync.accumulating(steps=2)
    def step(model, optimizer, x):
        return mean_loss(model, x)

    for index in range(2):
        step(model, optimizer, micro_batch(dist.get_rank(), index))
    return model.state_dict()


def test_a_window_is_the_mean_of_all_its_micro_batches(ranks):
    window = [(rank, index) for rank in range(2) for index in range(2)]
    [expected] = states(small_model(), [window], window_mean)
    for came in ranks(2).run(two_micro_batches):
        assert_equal_state(came, expected, 1e-12)
