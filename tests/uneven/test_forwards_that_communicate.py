"""Ranks of different lengths where forwards communicate: who has run out repeats its last call, and weighs nothing."""

from __future__ import annotations

import re
from collections import namedtuple

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    ShardingStrategy,  # noqa: E402
    fully_shard,
)
from torch.nn.parallel import DistributedDataParallel as DDP

import gradsync
from gradsync import LossSum, accumulating
from tests.support.compare import assert_equal_updates
from tests.support.models import small_model
from tests.support.recorder import Recorder
from tests.support.reference import cut, mean_loss, micro_batch, train, window_mean

KINDS = ["fsdp2", "fsdp2, root not wrapped", "fsdp1", "fsdp1, not sharded"]
_STRATEGIES = {"fsdp1": ShardingStrategy.FULL_SHARD, "fsdp1, not sharded": ShardingStrategy.NO_SHARD}


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


def uneven(kind: str, lengths: list[int], how: str, sums: bool = False, poison: bool = False, skip_items=()) -> int:
    """Each micro-batch counts once; a replay weighs nothing, whatever its loss is."""
    rank = dist.get_rank()
    home = sharded(kind)
    optimizer = Recorder(home.parameters(), lr=0.05)
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

    expected, end = train(small_model(), cut([len(one) for one in left], 3), whole, lr=0.05)
    if kind.startswith("fsdp1") and kind != "fsdp1, not sharded":
        assert len(optimizer.seen) == len(expected)
        compare_flat(home, end)
    else:
        assert_equal_updates(optimizer.seen, expected, 1e-10)
    return replays


def compare_flat(home, end) -> None:
    """FSDP1 keeps pieces: compare what comes out of the training."""
    with FullyShardedDataParallel.summon_full_params(home):
        for p, q in zip(home.parameters(), end.parameters(), strict=True):
            torch.testing.assert_close(p.reshape(q.shape), q, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("how", ["over", "unsized", "sync_every"])
def test_each_micro_batch_counts_once(ranks, kind, how):
    for lengths in ([3, 7], [8, 2], [1, 5], [4, 4], [6, 3]):
        replays = ranks(2).run(uneven, kind, lengths, how)
        assert replays == [max(lengths) - n for n in lengths]


@pytest.mark.parametrize("how", ["over", "sync_every"])
def test_sums_weigh_by_their_counts(ranks, how):
    ranks(2).run(uneven, "fsdp2", [3, 7], how, True)


@pytest.mark.parametrize("how", ["over", "sync_every"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_nan_in_a_replay_leaves_no_trace(ranks, how, kind):
    """Its gradients are replaced by zeros at the parameters."""
    ranks(2).run(uneven, kind, [7, 2], how, False, True)


def test_loops_that_pass_over_items(ranks):
    ranks(2).run(uneven, "fsdp2", [5, 8], "over", False, False, [[0, 1], [1, 7], [1, 2]])
    ranks(2).run(uneven, "fsdp2", [5, 8], "over", False, False, [[0, 4], [1, 7], [1, 6], [1, 5]])


def skipping(kind: str, bad: list) -> list:
    """A micro-batch that fails before the model is called is dropped on that rank alone."""
    rank = dist.get_rank()
    home = sharded(kind)
    optimizer = Recorder(home.parameters(), lr=0.05)

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


@pytest.mark.parametrize("bad", [[[0, 1]], [[1, 2]], [[0, 4], [0, 5]], [[1, 6]]])
def test_skipped_micro_batches(ranks, bad):
    counts = ranks(2).run(skipping, "fsdp2", bad)
    assert counts == [[sum(r == rank for r, _ in bad)] * 2 for rank in range(2)]


class Batch:
    """An object of the user's: a replay refers to it weakly."""

    def __init__(self, x: torch.Tensor | None) -> None:
        self.x = x


def dropping_too_late(what: str) -> str:
    """What each rank is told where `skip` cannot drop a micro-batch."""
    rank = dist.get_rank()
    home = sharded("fsdp2")
    optimizer = Recorder(home.parameters())

    @accumulating(steps=2, skip=ValueError, model=home, optimizer=optimizer)
    def step(batch):
        if batch.x is None:
            raise ValueError
        loss = mean_loss(home, batch.x)
        if what == "after its forward":
            raise ValueError
        return loss

    try:
        step(Batch(micro_batch(rank, 0) if what != "the first" or rank == 0 else None))
        step(Batch(None))
    except gradsync.GradSyncError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("after its forward", "only before its model is called, for the other ranks wait in the model's forward, but ValueError"),
        ("the first", "must be a good one on every rank .* but rank 1 dropped it"),
        ("after a batch that is gone", "repeats its last call of .* where it has no micro-batch to run"),
    ],
)
def test_a_micro_batch_that_cannot_be_dropped(ranks, what, words):
    for text in ranks(2).run(dropping_too_late, what, limit=15):
        assert re.search(words, text), text


Named = namedtuple("Named", ["x", "weight"])


def other_arguments() -> None:
    """A named tuple, an object and a set among the arguments: a replay has them again."""
    rank, lengths = dist.get_rank(), [5, 2]
    home = sharded("fsdp2")
    optimizer = Recorder(home.parameters(), lr=0.05)

    @accumulating(steps=2, model=home, optimizer=optimizer)
    def step(named, batch, weights):
        return mean_loss(home, named.x) * named.weight * max(weights) + 0 * batch.x.sum()

    for x in step.over([micro_batch(rank, i) for i in range(lengths[rank])]):
        step(Named(x, 0.5), Batch(x), {1.0, 2.0})
    expected, _ = train(small_model(), cut(lengths, 2), window_mean, lr=0.05)
    assert_equal_updates(optimizer.seen, expected, 1e-10)


def test_a_replay_of_arguments_of_other_types(ranks):
    ranks(2).run(other_arguments, limit=15)


def an_empty_rank(kind: str, how: str, empty: tuple[int, ...] = (1,)) -> str:
    rank = dist.get_rank()
    home = DDP(small_model(), static_graph=True) if kind == "static graph" else sharded(kind)
    optimizer = Recorder(home.parameters())
    data = [] if rank in empty else [micro_batch(rank, 0)]
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


@pytest.mark.parametrize("how", ["over", "sync_every"])
@pytest.mark.parametrize("kind", ["fsdp2", "static graph"])
def test_a_rank_that_never_had_an_item_is_named_on_every_rank(ranks, kind, how):
    """A static graph needs one of each rank, too: its very first backward synchronises."""
    for text in ranks(2).run(an_empty_rank, kind, how):
        assert "needs at least one item in" in text and "rank 1 has none" in text, text


def test_no_item_on_any_rank_is_fine(ranks):
    for kind in ("fsdp2", "static graph"):
        assert ranks(2).run(an_empty_rank, kind, "over", (0, 1)) == ["no error"] * 2


def taking_items_out(kind: str, how: str) -> None:
    """A body that takes its targets out of the batch, as those of transformers do; a replay gets it as it came."""
    rank, lengths = dist.get_rank(), [5, 2]
    home = sharded(kind)
    optimizer = Recorder(home.parameters(), lr=0.05)
    data = [{"x": micro_batch(rank, i), "weight": 1.0} for i in range(lengths[rank])]

    def loss_of(batch):
        return mean_loss(home, batch.pop("x")) * batch.pop("weight")

    if how == "sync_every":
        for micro, batch in gradsync.sync_every(home, 2, data):
            micro.backward(loss_of(batch))
            if micro.last:
                optimizer.step()
                optimizer.zero_grad()
    else:
        step = accumulating(steps=2, model=home, optimizer=optimizer)(loss_of)
        for batch in step.over(data):
            step(batch)
    expected, _ = train(small_model(), cut(lengths, 2), window_mean, lr=0.05)
    assert_equal_updates(optimizer.seen, expected, 1e-10)


@pytest.mark.parametrize("how", ["decorated", "sync_every"])
def test_a_body_that_takes_items_out_of_its_batch(ranks, how):
    ranks(2).run(taking_items_out, "fsdp2", how, limit=15)


def carried_after(what: str, engine: str) -> None:
    """A window is discarded, or flushed, in the middle of a loop of known length: the next one is carried as it is."""
    rank = dist.get_rank()
    home = sharded("fsdp2") if engine == "fsdp2" else small_model()
    optimizer = Recorder(home.parameters(), lr=0.05)
    step = accumulating(steps=3, tail="carry", model=home, optimizer=optimizer)(lambda x: mean_loss(home, x))
    windows = [[]]
    for epoch, length in enumerate([7, 2]):
        for i in step.over(range(length)):
            if (epoch, i) == (0, 5) and what == "exception":
                with pytest.raises(TypeError):
                    step(None)
                windows[-1].clear()
                continue
            step(micro_batch(rank, 10 * epoch + i))
            windows[-1] += [(r, 10 * epoch + i) for r in range(dist.get_world_size())]
            if (epoch, i) == (0, 4) and what in {"flush", "reset"}:
                getattr(step, what)()
                if what == "reset":
                    windows[-1].clear()
                else:
                    windows.append([])
            elif len(windows[-1]) == 3 * dist.get_world_size():
                windows.append([])
    step.flush()
    expected, _ = train(small_model(), [one for one in windows if one], window_mean, lr=0.05)
    assert_equal_updates(optimizer.seen, expected)


@pytest.mark.parametrize("what", ["exception", "flush", "reset"])
@pytest.mark.parametrize("engine", ["bare", "fsdp2"])
def test_a_window_is_carried_after_another_was_discarded(ranks, what, engine):
    ranks(2).run(carried_after, what, engine, limit=15)
