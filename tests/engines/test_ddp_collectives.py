"""How many collectives each micro-batch runs on DDP, and what buffers do."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

import gradsync
from gradsync import LossSum, accumulating
from tests.support.models import WithBuffers, small_model
from tests.support.recorder import Recorder
from tests.support.reference import mean_loss, micro_batch, sum_loss
from tests.support.wire import num_collectives


def collectives() -> None:
    """Held micro-batches communicate nothing; the boundary reduces each bucket once and nothing else."""
    rank = dist.get_rank()
    for wrap in (lambda m: m, DDP):
        model = small_model()
        home = wrap(model)
        optimizer = Recorder(model.parameters())
        step = accumulating(steps=3)(lambda model, optimizer, x: mean_loss(model, x))
        counts = []
        for i in range(12):
            before = num_collectives()
            step(home, optimizer, micro_batch(rank, i))
            counts.append(num_collectives() - before)
        # Between more than two ranks, the ledger behind a bare model has a bucket of its own.
        once = 2 if home is model and dist.get_world_size() > 2 else 1
        assert counts[3:] == [0, 0, once] * 3, counts
        sums = accumulating(steps=3)(lambda model, optimizer, x: LossSum(sum_loss(model, x), x.numel()))
        counts = []
        for i in range(9):
            before = num_collectives()
            sums(home, optimizer, micro_batch(rank, i))
            counts.append(num_collectives() - before)
        # The counts travel in the ledger; for DDP of the user's own they need a collective.
        told = once if home is model else 2
        assert counts == [0, 0, told] * 3, counts


@pytest.mark.parametrize("size", [2, 3])
def test_collectives(ranks, size):
    ranks(size).run(collectives)


def tables(wrap: str) -> None:
    """In a loop a boundary may send one table more, of known lengths or not; what is held sends nothing."""
    rank = dist.get_rank()
    model = small_model()
    home = model if wrap == "bare" else DDP(model)
    optimizer = Recorder(model.parameters())
    step = accumulating(steps=3)(lambda model, optimizer, x: mean_loss(model, x))
    items = [micro_batch(rank, i) for i in range(9)]
    for x in items[:3]:  # the first window rebuilds the buckets
        step(home, optimizer, x)
    once = 2 if wrap == "bare" and dist.get_world_size() > 2 else 1

    def check(sent: list[int]) -> None:
        last = {i for i in range(len(sent)) if i % 3 == 2 or i == len(sent) - 1}
        assert all(once <= n <= once + 1 if i in last else n == 0 for i, n in enumerate(sent)), sent

    mine = items[: [3, 8, 9][rank]]
    for data in (items, iter(items), mine, iter(mine)):
        sent = []
        for x in step.over(data):
            before = num_collectives()
            step(home, optimizer, x)
            sent.append(num_collectives() - before)
        check(sent)
    for data in (items, iter(items)):
        sent = []
        for micro, x in gradsync.sync_every(home, 3, data):
            before = num_collectives()
            micro.backward(mean_loss(home, x))
            sent.append(num_collectives() - before)
            if micro.last:
                optimizer.step()
                optimizer.zero_grad()
        check(sent)


@pytest.mark.parametrize("wrap", ["bare", "ddp"])
@pytest.mark.parametrize("size", [2, 3])
def test_a_window_sends_one_table_at_most(ranks, size, wrap):
    ranks(size).run(tables, wrap)


def buffers() -> None:
    """Broadcast as a window opens, from rank 0, and by no forward."""
    rank = dist.get_rank()
    for wrap in (lambda m: m, DDP):
        model = WithBuffers()
        home = wrap(model)
        optimizer = Recorder(model.parameters())
        seen = []

        def body(model, optimizer, x):
            seen.append(home.norm.running_mean.clone() if home is model else home.module.norm.running_mean.clone())
            return mean_loss(home, x)

        step = accumulating(steps=2, model=home)(lambda optimizer, x: body(model, optimizer, x))
        step(optimizer, micro_batch(rank, 0)), step(optimizer, micro_batch(rank, 1))
        with torch.no_grad():
            model.norm.running_mean.fill_(10.0 + rank)
        for i in range(2, 4):
            step(optimizer, micro_batch(rank, i))
        assert torch.equal(seen[2], torch.full((3,), 10.0, dtype=torch.float64)), seen[2]
        others = [torch.empty_like(seen[3]) for _ in range(2)]
        dist.all_gather(others, seen[3])
        assert not torch.equal(*others), "in the window each rank's statistics are its own"


def test_buffers(ranks):
    ranks(2).run(buffers)
