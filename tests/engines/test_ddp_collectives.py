"""How many collectives each micro-batch runs on DDP, and what buffers do."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed._composable.replicate import replicate
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
        once = 2 if home is model else 1  # the ledger behind a bare model has a bucket of its own
        assert counts[3:] == [0, 0, once] * 3, counts
        sums = accumulating(steps=3)(lambda model, optimizer, x: LossSum(sum_loss(model, x), x.numel()))
        counts = []
        for i in range(9):
            before = num_collectives()
            sums(home, optimizer, micro_batch(rank, i))
            counts.append(num_collectives() - before)
        assert counts == [0, 0, once + 1] * 3, counts  # the table with the counts


@pytest.mark.parametrize("size", [2, 3])
def test_collectives(ranks, size):
    ranks(size).run(collectives)


def bare(model):
    return model


def tables(wrap, once: int) -> None:
    """In a loop a boundary may send one table more, of known lengths or not; what is held sends nothing."""
    rank = dist.get_rank()
    model = small_model()
    home = wrap(model)
    optimizer = Recorder(model.parameters())
    step = accumulating(steps=3)(lambda model, optimizer, x: mean_loss(model, x))
    items = [micro_batch(rank, i) for i in range(9)]
    for x in items[:3]:  # the first window rebuilds the buckets
        step(home, optimizer, x)

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


@pytest.mark.parametrize(("wrap", "once"), [(bare, 2), (DDP, 1)])
@pytest.mark.parametrize("size", [2, 3])
def test_a_window_sends_one_table_at_most(ranks, size, wrap, once):
    ranks(size).run(tables, wrap, once)


def buffers() -> None:
    """Made equal when a window closes, from the lowest rank that was to have a micro-batch, and by no forward."""
    rank = dist.get_rank()
    for wrap in (lambda m: m, DDP, replicate):
        model = WithBuffers()
        home = wrap(model)
        optimizer = Recorder(model.parameters())
        step = accumulating(steps=2, model=home)(lambda optimizer, x: mean_loss(home, x))

        def means() -> list[torch.Tensor]:
            each = [torch.empty_like(model.norm.running_mean) for _ in range(2)]
            dist.all_gather(each, model.norm.running_mean)
            return each

        step(optimizer, micro_batch(rank, 0))
        assert not torch.equal(*means()), "in the window each rank's statistics are its own"
        twin = WithBuffers()
        for i in range(2):
            mean_loss(twin, micro_batch(0, i))
        step(optimizer, micro_batch(rank, 1))
        assert torch.equal(*means())
        assert torch.equal(model.norm.running_mean, twin.norm.running_mean), "rank 0's"
        for x in step.over([micro_batch(rank, i) for i in range(2, 2 + [1, 3][rank])]):
            step(optimizer, x)
            if rank == 1 and step.progress.micro_steps == 5:  # its own, in a window that rank 0 has no part in
                last = model.norm.running_mean.clone()
        assert torch.equal(*means())
        if rank == 1:
            assert torch.equal(model.norm.running_mean, last)


def test_buffers(ranks):
    ranks(2).run(buffers)
