"""Several windows in one loop of ranks of different lengths."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP

import gradsync
from tests.support.compare import assert_equal_updates
from tests.support.models import WithBuffers, small_model
from tests.support.recorder import Recorder
from tests.support.reference import cut, mean_loss, micro_batch, train, window_mean


def sharded_and_not(lengths: list[int], nested: bool, sharded: int, known: bool) -> None:
    """One model whose forward communicates, and one whose does not, in one uneven loop: each in windows of its own."""
    rank = dist.get_rank()
    models = [small_model(), small_model()]
    fully_shard(models[sharded], mesh=init_device_mesh("cpu", (2,)))
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    sizes = [3, 2] if nested else [3, 3]
    body = lambda model, optimizer, x: mean_loss(model, x)  # noqa: E731
    one = gradsync.accumulating(steps=3)(body)
    other = gradsync.accumulating(steps=2)(lambda *args: body(*args)) if nested else one
    items = [micro_batch(rank, i) for i in range(lengths[rank])]
    data = items if known else iter(items)
    for x in one.over(other.over(data)) if nested else one.over(data):
        one(models[0], optimizers[0], x)
        other(models[1], optimizers[1], x)
    for model, size in zip(models, sizes, strict=True):
        twin = small_model()
        optimizer = torch.optim.SGD(twin.parameters(), lr=0.1)
        for window in cut(lengths, size):
            loss = sum(mean_loss(twin, micro_batch(*place)) for place in window) / len(window)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        for got, expected in zip(model.parameters(), twin.parameters(), strict=True):
            full = got.full_tensor() if hasattr(got, "full_tensor") else got
            assert torch.allclose(full, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("lengths", [[5, 2], [2, 5], [7, 1], [1, 6], [6, 6], [3, 4]])
@pytest.mark.parametrize("sharded", [0, 1])
@pytest.mark.parametrize("nested", [False, True])
def test_a_sharded_model_and_another_in_one_loop(ranks, nested, sharded, lengths):
    for known in (False, True):
        ranks(2).run(sharded_and_not, lengths, nested, sharded, known)


def several_windows(lengths: list[int], nested: bool) -> str:
    """Two models in one loop, the second with buffers, in windows of 4 and 3: of one function, or of two."""
    rank = dist.get_rank()
    models = [small_model(), nn.Sequential(nn.BatchNorm1d(3, dtype=torch.float64), small_model())]
    optimizers = [Recorder(model.parameters()) for model in models]
    sizes = lambda window: (4, 3)[window % 2]  # noqa: E731

    def body(model, optimizer, x):
        return mean_loss(model[1] if len(model) == 2 else model, x) + (model[0](x).sum() * 0 if len(model) == 2 else 0)

    one = gradsync.accumulating(steps=sizes)(body)
    other = gradsync.accumulating(steps=sizes)(lambda *args: body(*args)) if nested else one
    for model, optimizer, step in zip(models, optimizers, (one, other)):
        for i in range(7):  # both are known to every rank: one of 4 and one of 3
            step(model, optimizer, micro_batch(rank, 50 + i))
    data = [micro_batch(rank, i) for i in range(lengths[rank])]
    try:
        for x in one.over(other.over(data)) if nested else one.over(data):
            one(models[0], optimizers[0], x)
            other(models[1], optimizers[1], x)
    except gradsync.GradSyncError as error:
        return str(error)
    before = [[(r, 50 + i) for r in range(2) for i in part] for part in (range(4), range(4, 7))]
    expected, _ = train(small_model(), [*before, *cut(lengths, sizes)], window_mean)
    assert_equal_updates(optimizers[0].seen, expected)
    inner = [[grad for grad in window[2:]] for window in optimizers[1].seen]
    assert_equal_updates(inner, expected)
    for buffer in models[1].buffers():
        both = [torch.zeros_like(buffer) for _ in range(2)]
        dist.all_gather(both, buffer)
        assert torch.equal(*both)
    return "exact"


@pytest.mark.parametrize("nested", [False, True])
def test_several_windows_in_one_loop(ranks, nested):
    """Also on a rank that has run out, or never had an item of this loop: which window closes, the others tell."""
    for lengths in ([5, 2], [2, 5], [4, 9], [7, 7], [1, 8], [3, 0], [0, 4]):
        assert ranks(2).run(several_windows, lengths, nested) == ["exact"] * 2


def own_cadences(lengths: list[int], sizes: tuple[int, int], known: bool, overlap: int) -> None:
    """Two functions in windows of their own length, called in turn for each item."""
    rank = dist.get_rank()
    models = [small_model(), small_model()]
    optimizers = [Recorder(model.parameters()) for model in models]
    steps = [
        gradsync.accumulating(steps=size, model=model, optimizer=optimizer, overlap=min(overlap, size))(
            lambda x, model=model: mean_loss(model, x)
        )
        for size, model, optimizer in zip(sizes, models, optimizers, strict=True)
    ]
    items = [micro_batch(rank, i) for i in range(lengths[rank])]
    for x in steps[0].over(steps[1].over(items if known else iter(items))):
        for step in steps:
            step(x)
    for size, optimizer in zip(sizes, optimizers, strict=True):
        expected, _ = train(small_model(), cut(lengths, size), window_mean)
        assert_equal_updates(optimizer.seen, expected)
        for parameter in optimizer.param_groups[0]["params"]:
            first = parameter.detach().clone()
            dist.broadcast(first, 0)
            assert torch.equal(first, parameter)


@pytest.mark.parametrize("sizes", [(2, 3), (3, 2), (1, 4)])
def test_functions_with_cadences_of_their_own(ranks, sizes):
    """On the last item of a rank the others may come to another window first: it waits for their word, and closes theirs."""
    for lengths in ([10, 11], [9, 4], [1, 5], [7, 7], [3, 8]):
        for known in (True, False):
            ranks(2).run(own_cadences, lengths, sizes, known, 0)


def closed_by_the_last_call() -> list[tuple[int, int]]:
    """After each item: how many updates each function has made."""
    steps, homes = [], []
    for _ in range(2):
        model = small_model()
        steps.append(gradsync.accumulating(steps=2)(lambda model, optimizer, x: mean_loss(model, x)))
        homes.append((model, torch.optim.SGD(model.parameters(), lr=0.1)))
    updates = []
    for i in steps[0].over(steps[1].over(range(3))):
        for step, home in zip(steps, homes, strict=True):
            step(*home, micro_batch(dist.get_rank(), i))
        updates.append(tuple(step.progress.updates for step in steps))
    return updates


@pytest.mark.parametrize("size", [1, 2])
def test_of_equal_lengths_the_last_call_closes_each_window(ranks, size):
    """As with one function: nobody has to ask the others after it."""
    assert ranks(size).run(closed_by_the_last_call) == [[(0, 0), (1, 1), (2, 2)]] * size


def one_of_them_alone(overlap: int, solo_first: bool) -> list[torch.Tensor]:
    """A model in a group of this rank alone, and one of all ranks with buffers, in one loop; the latter's buffers."""
    rank = dist.get_rank()
    groups = [dist.new_group([one]) for one in range(dist.get_world_size())]
    solo, model = DDP(small_model(), process_group=groups[rank]), WithBuffers()
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (solo, model)]
    alone = gradsync.accumulating(2)(lambda model, optimizer, x: mean_loss(model, x))
    together = gradsync.accumulating(2, overlap=overlap)(lambda model, optimizer, x: mean_loss(model, x))
    seen = []
    for index in alone.over(together.over(range(4))):
        x = micro_batch(rank, index)
        if solo_first:
            alone(solo, optimizers[0], x)
        together(model, optimizers[1], x)
        if not solo_first:
            alone(solo, optimizers[0], x)
        if together.progress.index == 0:
            seen += [buffer.clone() for buffer in model.buffers()]
    return seen


@pytest.mark.parametrize("overlap", [0, 1])
@pytest.mark.parametrize("solo_first", [True, False])
def test_a_model_of_this_rank_alone_beside_one_of_all_ranks(ranks, overlap, solo_first):
    """Buffers are equal as each window closes, whichever was called first."""
    first, second = ranks(2).run(one_of_them_alone, overlap, solo_first)
    assert len(first) == 6
    for one, other in zip(first, second, strict=True):
        assert torch.equal(one, other)
