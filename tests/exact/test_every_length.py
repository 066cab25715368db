"""After each boundary the gradients are the mean over all micro-batches of all ranks in the window."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

import gradsync
from tests.support.compare import assert_equal_updates
from tests.support.items import unsized
from tests.support.models import small_model
from tests.support.recorder import Recorder
from tests.support.reference import cut, mean_loss, micro_batch, train, window_mean


def bare(model):
    return model


def over(step, home, optimizer, steps: int, data: list) -> None:
    for x in step.over(data):
        step(home, optimizer, x)


def over_unsized(step, home, optimizer, steps: int, data: list) -> None:
    over(step, home, optimizer, steps, unsized(data))


def flush(step, home, optimizer, steps: int, data: list) -> None:
    for x in data:
        step(home, optimizer, x)
    step.flush()


def sync_every(step, home, optimizer, steps: int, data: list) -> None:
    for micro, x in gradsync.sync_every(home, steps, data):
        micro.backward(mean_loss(home, x))
        if micro.last:
            optimizer.step()
            optimizer.zero_grad()


def all_lengths(steps: int, loop, wrap, most: int) -> int:
    """Every number of micro-batches up to `most`, the same on each rank."""
    rank, size = dist.get_rank(), dist.get_world_size()
    model = small_model()
    start = {k: v.clone() for k, v in model.state_dict().items()}
    home = wrap(model)
    optimizer = Recorder(model.parameters())

    @gradsync.accumulating(steps=steps)
    def step(model, optimizer, x):
        return mean_loss(model, x)

    for length in range(most + 1):
        model.load_state_dict(start)
        optimizer.seen = []
        loop(step, home, optimizer, steps, [micro_batch(rank, i) for i in range(length)])
        expected, end = train(small_model(), cut([length] * size, steps), window_mean)
        assert_equal_updates(optimizer.seen, expected)
        for p, q in zip(model.parameters(), end.parameters(), strict=True):
            torch.testing.assert_close(p, q, rtol=1e-11, atol=1e-13)
    return most + 1


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("loop", [over, over_unsized, flush, sync_every])
@pytest.mark.parametrize("wrap", [bare, DDP])
def test_every_length_and_window_is_the_float64_mean(new_ranks, size, loop, wrap):
    """0 to 12 micro-batches in windows of 1 to 6, on 1 to 3 ranks."""
    for steps in range(1, 7):
        assert new_ranks(size).run(all_lengths, steps, loop, wrap, 12) == [13] * size
