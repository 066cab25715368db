"""What runs on the ranks for test_exact.py."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP

import gradsync
from gradsync import LossSum
from tests.support.reference import (
    Recorder, assert_equal_updates, cut, mean_loss, micro_batch, small_model, sum_loss, train, window_mean,
)  # fmt: skip


def unsized(items):
    yield from items


def all_lengths(steps: int, mode: str, wrap: str, most: int) -> int:
    """Every number of micro-batches up to `most`, the same on each rank."""
    rank, size = dist.get_rank(), dist.get_world_size()
    model = small_model()
    start = {k: v.clone() for k, v in model.state_dict().items()}
    home = model if wrap == "bare" else DDP(model, find_unused_parameters=wrap == "find_unused")
    optimizer = Recorder(model.parameters())

    @gradsync.accumulating(steps=steps)
    def step(model, optimizer, x):
        return mean_loss(model, x)

    for length in range(most + 1):
        model.load_state_dict(start)
        optimizer.seen = []
        data = [micro_batch(rank, i) for i in range(length)]
        if mode == "over":
            for x in step.over(data):
                step(home, optimizer, x)
        elif mode == "unsized":
            for x in step.over(unsized(data)):
                step(home, optimizer, x)
        elif mode == "flush":
            for x in data:
                step(home, optimizer, x)
            step.flush()
        else:
            for micro, x in gradsync.sync_every(home, steps, data):
                micro.backward(mean_loss(home, x))
                if micro.last:
                    optimizer.step()
                    optimizer.zero_grad()
        expected, end = train(small_model(), cut([length] * size, steps), window_mean)
        assert_equal_updates(optimizer.seen, expected)
        for p, q in zip(model.parameters(), end.parameters()):
            torch.testing.assert_close(p, q, rtol=1e-11, atol=1e-13)
    return most + 1


def uneven(lengths: list[int], steps, mode: str, wrap: str, kind: str = "mean") -> None:
    """Ranks with different numbers of micro-batches, and counts that differ."""
    rank = dist.get_rank()
    model = small_model(unused=wrap in {"bare", "find_unused"})
    kwargs = {"find_unused": {"find_unused_parameters": True}, "views": {"gradient_as_bucket_view": True}}
    kwargs |= {"static": {"static_graph": True}, "buckets": {"bucket_cap_mb": 1e-4}}
    home = model if wrap == "bare" else DDP(model, **kwargs.get(wrap, {}))
    optimizer = Recorder(model.parameters())
    rows = lambda r, i: 1 + (5 * r + 3 * i) % 4  # noqa: E731
    data = [micro_batch(rank, i, rows(rank, i)) for i in range(lengths[rank])]

    def loss_of(model, x):
        return LossSum(sum_loss(model, x), x.numel()) if kind == "sum" else mean_loss(model, x)

    @gradsync.accumulating(steps=steps, model=home, optimizer=optimizer)
    def step(x):
        return loss_of(home, x)

    if mode == "sync_every":
        for micro, x in gradsync.sync_every(home, steps, data):
            if kind == "sum":
                micro.backward(sum_loss(home, x), count=x.numel())
            else:
                micro.backward(mean_loss(home, x))
            if micro.last:
                optimizer.step()
                optimizer.zero_grad()
    else:
        for x in step.over(data if mode == "over" else unsized(data)):
            step(x)

    def whole(model, window):
        xs = [micro_batch(r, i, rows(r, i)) for r, i in window]
        if kind == "sum":
            return sum(sum_loss(model, x) for x in xs) / sum(x.numel() for x in xs)
        return sum(mean_loss(model, x) for x in xs) / len(xs)

    expected, _ = train(small_model(unused=wrap in {"bare", "find_unused"}), cut(lengths, steps), whole)
    assert_equal_updates(optimizer.seen, expected)


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


def one_of_several(wrap: str, how: str) -> None:
    """Two models in one step, of which each micro-batch uses one, the boundary's on each rank another."""
    rank = dist.get_rank()
    make = lambda: [nn.Linear(3, 2).double(), small_model()]  # noqa: E731
    torch.manual_seed(1)
    models = make()
    torch.manual_seed(1)
    twins = make()
    homes = models if wrap == "bare" else [DDP(model, find_unused_parameters=True) for model in models]
    optimizer = Recorder([p for model in models for p in model.parameters()])
    used = [[1, 0, 0, 1, 1, 1, 0, 0, 0], [1, 1, 1, 0, 0, 0, 1, 0, 0]]
    items = [(micro_batch(rank, i), used[rank][i]) for i in range(9)]
    if how.startswith("sync_every"):
        for micro, (x, which) in gradsync.sync_every(homes, 3, items):
            loss = mean_loss(homes[which], x)
            (loss / 3).backward() if how.endswith("plain") else micro.backward(loss)
            if micro.last:
                optimizer.step()
                optimizer.zero_grad()
    else:

        @gradsync.accumulating(steps=3, sync=how)
        def step(one, other, optimizer, x, which):
            return mean_loss((one, other)[which], x)

        for x, which in items:
            step(*homes, optimizer, x, which)
    for seen, start in zip(optimizer.seen, (0, 3, 6), strict=True):
        places = [(r, i) for r in range(2) for i in range(start, start + 3)]
        loss = sum(mean_loss(twins[used[r][i]], micro_batch(r, i)) for r, i in places) / len(places)
        parameters = [p for twin in twins for p in twin.parameters()]
        for p, gradient, got in zip(parameters, torch.autograd.grad(loss, parameters, allow_unused=True), seen, strict=True):
            assert (gradient is None) == (got is None)
            if gradient is not None:
                assert torch.allclose(got, gradient, rtol=1e-12, atol=1e-14), p.shape
                p.data -= 0.1 * gradient


def static_pair(steps: int, sync: str) -> None:
    """Two static graphs in one step, each of which owes a synchronisation of its very first micro-batch."""
    rank = dist.get_rank()
    torch.manual_seed(1)
    models = [nn.Linear(3, 3).double(), small_model()]
    homes = [DDP(model, static_graph=True) for model in models]
    optimizer = Recorder([p for model in models for p in model.parameters()], lr=0.0)

    @gradsync.accumulating(steps=steps, sync=sync)
    def step(one, other, optimizer, x):
        return mean_loss(other, one(x))

    for i in range(3 * steps):
        step(*homes, optimizer, micro_batch(rank, i))
    for number, seen in enumerate(optimizer.seen):
        places = [(r, i) for r in range(2) for i in range(number * steps, (number + 1) * steps)]
        loss = sum(mean_loss(models[1], models[0](micro_batch(*place))) for place in places) / len(places)
        for gradient, got in zip(torch.autograd.grad(loss, optimizer.param_groups[0]["params"]), seen, strict=True):
            assert torch.allclose(got, gradient, rtol=1e-12, atol=1e-14), (number, gradient.shape)


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
        assert torch.equal(*both) or lengths == [7, 7]
    return "exact"
