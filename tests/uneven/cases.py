"""What runs on the ranks for test_uneven.py: ranks of different lengths on engines whose forward communicates."""

from __future__ import annotations

import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

import gradsync
from gradsync import LossSum, accumulating
from tests.support.reference import (
    Recorder, assert_equal_updates, cut, mean_loss, micro_batch, small_model, sum_loss, train, window_mean,
)  # fmt: skip


class FullRecorder(Recorder):
    """Keeps whole gradients, wherever their parts are."""

    def step(self, closure=None):
        whole = [
            None if p.grad is None else getattr(p.grad, "full_tensor", lambda g=p.grad: g)().detach().clone()
            for group in self.param_groups
            for p in group["params"]
        ]
        super().step(closure)
        self.seen[-1] = whole


def sharded(kind: str) -> nn.Module:
    model = small_model()
    if kind == "fsdp2":
        for layer in (model[0], model[2]):
            fully_shard(layer)
        return fully_shard(model)
    if kind == "fsdp2, root not wrapped":
        fully_shard(model[0])
        fully_shard(model[2])
        return model
    return FullyShardedDataParallel(
        model, device_id=torch.device("cpu"), use_orig_params=True, sharding_strategy=_STRATEGIES[kind]
    )


from torch.distributed.fsdp import ShardingStrategy  # noqa: E402

_STRATEGIES = {"fsdp1": ShardingStrategy.FULL_SHARD, "fsdp1, not sharded": ShardingStrategy.NO_SHARD}


def uneven(kind: str, lengths: list[int], how: str, sums: bool = False, poison: bool = False, skip_items=()) -> int:
    """Each micro-batch counts once; a replay weighs nothing, whatever its loss is."""
    rank = dist.get_rank()
    home = sharded(kind)
    optimizer = FullRecorder(home.parameters(), lr=0.05)
    data = [micro_batch(rank, i) for i in range(lengths[rank])]
    calls = 0

    def loss_of(x):
        nonlocal calls
        calls += 1
        y = home(x)
        if poison and calls > lengths[rank]:
            y = y * float("nan")
        if sums:
            return LossSum(y.square().sum(), y.numel())
        return y.square().mean() + y.sum() * 0.1

    if how == "sync_every":
        replays = 0
        for step, x in gradsync.sync_every(home, 3, data):
            loss = loss_of(x)
            step.backward(loss.loss, count=loss.count) if sums else step.backward(loss)
            replays += step.replay
            if step.last:
                optimizer.step()
                optimizer.zero_grad()
    else:
        step = accumulating(steps=3, model=home, optimizer=optimizer)(loss_of)
        for i, x in enumerate(step.over(data if how == "over" else iter(data))):
            if [rank, i] not in list(skip_items):
                step(x)
        replays = step.progress.replays
    left = [[i for i in range(n) if [r, i] not in list(skip_items)] for r, n in enumerate(lengths)]

    def whole(model, window):
        xs = [micro_batch(r, left[r][i]) for r, i in window]
        if sums:
            return sum(model(x).square().sum() for x in xs) / sum(model(x).numel() for x in xs)
        return sum(mean_loss(model, x) for x in xs) / len(xs)

    expected, _ = train(small_model(), cut([len(one) for one in left], 3), whole, lr=0.05)
    if kind.startswith("fsdp1") and kind != "fsdp1, not sharded":
        assert len(optimizer.seen) == len(expected)
        compare_flat(home, expected)
    else:
        assert_equal_updates(optimizer.seen, expected, 1e-10)
    return replays


def compare_flat(home, expected) -> None:
    """FSDP1 keeps pieces: compare what comes out of the training."""
    twin = small_model()
    for grads in expected:
        with torch.no_grad():
            for p, g in zip(twin.parameters(), grads):
                p -= 0.05 * g
    with FullyShardedDataParallel.summon_full_params(home):
        for p, q in zip(home.parameters(), twin.parameters()):
            torch.testing.assert_close(p.reshape(q.shape), q, rtol=1e-9, atol=1e-11)


def skipping(kind: str, bad: list) -> list:
    """A micro-batch that fails before the model is called is dropped on that rank alone."""
    rank = dist.get_rank()
    home = sharded(kind)
    optimizer = FullRecorder(home.parameters(), lr=0.05)

    @accumulating(steps=3, skip=ValueError, model=home, optimizer=optimizer)
    def step(i):
        if [rank, i] in bad:
            raise ValueError
        return mean_loss(home, micro_batch(rank, i))

    for i in step.over(range(7)):
        step(i)
    windows = [[(r, i) for r, i in w if [r, i] not in bad] for w in cut([7, 7], 3)]
    expected, _ = train(small_model(), [w for w in windows if w], window_mean, lr=0.05)
    assert_equal_updates(optimizer.seen, expected, 1e-10)
    return [step.progress.dropped, step.progress.replays]


def an_empty_rank(kind: str, how: str) -> str:
    rank = dist.get_rank()
    home = sharded(kind)
    optimizer = FullRecorder(home.parameters())
    data = [] if rank == 1 else [micro_batch(rank, 0)]
    step = accumulating(steps=2, model=home, optimizer=optimizer)(lambda x: mean_loss(home, x))
    try:
        if how == "over":
            for x in step.over(data):
                step(x)
        else:
            for micro, x in gradsync.sync_every(home, 2, data):
                micro.backward(mean_loss(home, x))
    except gradsync.GradSyncError as error:
        return str(error)
    return "no error"


def resumed(kind: str) -> str:
    """Save in the middle of a window, load into another model, go on: the updates of an uninterrupted run."""
    import io

    rank = dist.get_rank()

    def begin():
        home = sharded(kind)
        optimizer = FullRecorder(home.parameters(), lr=0.05)
        return home, optimizer, accumulating(steps=3)(lambda home, optimizer, x: mean_loss(home, x))

    home, optimizer, step = begin()
    for i in range(5):
        step(home, optimizer, micro_batch(rank, i))
    saved = io.BytesIO()
    torch.save(step.state_dict(), saved)
    weights = {k: getattr(v, "full_tensor", lambda v=v: v)().clone() for k, v in home.state_dict().items()}
    step.reset()
    other, optimizer2, step2 = begin()
    with torch.no_grad():
        for name, parameter in other.named_parameters():
            mine = dict(home.named_parameters())[name]
            parameter.copy_(mine)
    saved.seek(0)
    step2.load_state_dict(torch.load(saved, weights_only=True))
    step2(other, optimizer2, micro_batch(rank, 5))
    expected, _ = train(small_model(), cut([6, 6], 3), window_mean, lr=0.05)
    assert_equal_updates(optimizer.seen + optimizer2.seen, expected, 1e-10)
    return f"{len(weights)} tensors"
