"""Ranks of one tensor-parallel group run one forward: different lengths are an error."""

from __future__ import annotations

import re

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import gradsync
from gradsync import LossSum
from tests.support.compare import assert_equal_states, assert_equal_updates
from tests.support.homes import tensor_parallel
from tests.support.models import net
from tests.support.recorder import Recorder
from tests.support.reference import mean_loss, mean_of, micro_batch, train
from tests.support.training import Run, data, reference


def tensor_parallel_ranks_of_unequal_length(dimensions: dict, lengths: list[int], said: list[str]) -> None:
    """They would wait for each other in a forward that one of them alone runs."""
    home = tensor_parallel(net(), **dimensions)
    rank = dist.get_rank()
    text = f"numbers of items, but {said[rank // 2]}. Ranks of one tensor-parallel group run one forward: give them the same data."
    with pytest.raises(gradsync.GradSyncError, match=re.escape(text)):
        Run(home, named=True).over(lengths[rank])
    with pytest.raises(gradsync.GradSyncError, match=re.escape(text)):
        for micro, index in gradsync.sync_every(home.model, 3, range(lengths[rank])):
            micro.backward(mean_of(home.model(data(home.rank, index))))
    run = Run(home)
    run.over(3)
    assert_equal_states(run.states, reference(home, [range(3)]))
    if not all(lengths):
        return
    # Where they are not known: as soon as they differ.
    text = "must come to the same micro-batches, but those of data-parallel rank 1 do not"
    with pytest.raises(gradsync.GradSyncError, match=text):
        Run(tensor_parallel(net(), **dimensions)).over(lengths[rank], known=False)
    home = tensor_parallel(net(), **dimensions)
    with pytest.raises(gradsync.GradSyncError, match=text):
        for micro, index in gradsync.sync_every(home.model, 3, iter(range(lengths[rank]))):
            micro.backward(mean_of(home.model(data(home.rank, index))))


@pytest.mark.parametrize(
    ("lengths", "said"),
    [
        ([3, 3, 5, 3], ["rank 0 has [3, 5], rank 1 has [3, 3]", "rank 2 has [3, 5], rank 3 has [3, 3]"]),
        ([3, 0, 3, 3], ["rank 0 has [3, 3], rank 1 has [0, 3]", "rank 2 has [3, 3], rank 3 has [0, 3]"]),
    ],
)
@pytest.mark.parametrize("dimensions", [{"data": 2}, {"replicas": 2, "shards": 1}], ids=["fsdp2", "hsdp"])
def test_tensor_parallel_ranks_of_unequal_length(ranks, dimensions, lengths, said):
    """Are an error on every rank, of the groups with equal lengths too, before any forward."""
    ranks(4).run(tensor_parallel_ranks_of_unequal_length, dimensions, lengths, said, limit=30)


def on_all_ranks(model: nn.Module) -> nn.Module:
    """Tensor parallelism over all ranks, without an engine; the first layer of three stays as it is."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return parallelize_module(model, mesh, {"1": ColwiseParallel(), "2": RowwiseParallel()})


def three_layers() -> nn.Module:
    torch.manual_seed(7)
    return nn.Sequential(nn.LayerNorm(3), nn.Linear(3, 4), nn.Linear(4, 2)).double()


def sums(model, x, index):
    return LossSum(mean_loss(model, x) * (index + 1), index + 1)


def means(model, x, index):
    return mean_loss(model, x)


def alone(loss, weighs: bool, known: bool, tail: str) -> None:
    """Five micro-batches in windows of two, the same on all ranks, in two epochs."""
    home = on_all_ranks(three_layers())
    optimizer = Recorder(home.parameters(), foreach=False)
    step = gradsync.accumulating(2, tail=tail)(lambda model, optimizer, index: loss(model, micro_batch(0, index), index))
    for epoch in range(2):
        for index in step.over(range(5) if known else iter(range(5))):
            step(home, optimizer, index)
    windows = {"step": [[0, 1], [2, 3], [4]] * 2, "drop": [[0, 1], [2, 3]] * 2, "carry": [[0, 1], [2, 3], [4, 0], [1, 2], [3, 4]]}

    def mean(model, window):
        parts = [(index + 1 if weighs else 1, mean_loss(model, micro_batch(0, index))) for _, index in window]
        return sum(weight * part for weight, part in parts) / sum(weight for weight, _ in parts)

    expected, _ = train(three_layers(), [[(0, index) for index in one] for one in windows[tail]], mean)
    assert_equal_updates(optimizer.seen, expected, 1e-10)


@pytest.mark.parametrize("tail", ["step", "drop", "carry"])
@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize(("loss", "weighs"), [(means, False), (sums, True)])
def test_tensor_parallelism_over_all_ranks(ranks, loss, weighs, known, tail):
    """It needs no engine; parameters that stay as they are get a DDP behind them."""
    ranks(2).run(alone, loss, weighs, known, tail)


def all_parallel() -> nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return parallelize_module(nn.Sequential(*three_layers()[1:]), mesh, {"0": ColwiseParallel(), "1": RowwiseParallel()})


def some_parallel() -> nn.Module:
    return on_all_ranks(three_layers())


def a_frozen_teacher() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 3).double(), all_parallel().requires_grad_(False))


def alone_and_of_unequal_length(make, lengths: list[int], known: bool) -> None:
    rank = dist.get_rank()
    items = range(lengths[rank])
    text = "give them the same data" if known else "must come to the same micro-batches"

    def trained(home, optimizer):
        step = gradsync.accumulating(2)(lambda model, optimizer, index: mean_loss(model, micro_batch(0, index)))
        for index in step.over(items if known else iter(items)):
            step(home, optimizer, index)

    def by_steps(home, optimizer):
        for step, index in gradsync.sync_every(home, 2, items if known else iter(items)):
            step.backward(mean_loss(home, micro_batch(0, index)))
            if step.last:
                optimizer.step()
                optimizer.zero_grad()

    for loop in (trained, by_steps):
        home = make()
        optimizer = torch.optim.SGD([p for p in home.parameters() if p.requires_grad], lr=0.1, foreach=False)
        with pytest.raises(gradsync.GradSyncError, match=text):
            loop(home, optimizer)


@pytest.mark.parametrize("lengths", [[3, 2], [2, 3], [4, 2], [2, 5]])
@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("make", [all_parallel, some_parallel, a_frozen_teacher])
def test_ranks_of_unequal_length_without_an_engine(ranks, make, known, lengths):
    ranks(2).run(alone_and_of_unequal_length, make, lengths, known, limit=20)
