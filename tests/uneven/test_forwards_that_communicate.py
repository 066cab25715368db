"""Ranks of different lengths where forwards communicate: who has run out repeats its last call, and weighs nothing."""

from __future__ import annotations

import copy
import re
from collections import namedtuple
from dataclasses import dataclass
from enum import Enum

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
from gradsync.decorator.body import Replay
from tests.support.compare import assert_equal_updates
from tests.support.items import Says
from tests.support.models import small_model
from tests.support.recorder import Recorder
from tests.support.reference import cut, mean_loss, micro_batch, train, window_mean
from tests.support.loops import over, over_unsized, sync_every


def fsdp2() -> nn.Module:
    return fully_shard(fsdp2_root_not_wrapped())


def fsdp2_root_not_wrapped() -> nn.Module:
    model = small_model()
    for layer in (model[0], model[2]):
        fully_shard(layer)
    return model


def fsdp1(strategy=ShardingStrategy.FULL_SHARD) -> nn.Module:
    cpu = torch.device("cpu")
    return FullyShardedDataParallel(small_model(), device_id=cpu, use_orig_params=True, sharding_strategy=strategy)


def fsdp1_not_sharded() -> nn.Module:
    return fsdp1(ShardingStrategy.NO_SHARD)


def static_graph() -> nn.Module:
    return DDP(small_model(), static_graph=True)


KINDS = [fsdp2, fsdp2_root_not_wrapped, fsdp1, fsdp1_not_sharded]


def uneven(make, lengths: list[int], loop, sums: bool = False, poison: bool = False, passed_over=()) -> int:
    """Each micro-batch counts once; a replay weighs nothing, whatever its loss is."""
    rank = dist.get_rank()
    home = make()
    optimizer = Recorder(home.parameters(), lr=0.05)
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

    data = [None if (rank, i) in passed_over else micro_batch(rank, i) for i in range(lengths[rank])]
    replays = loop(3, home, optimizer, loss_of, data)
    left = [[i for i in range(n) if (r, i) not in passed_over] for r, n in enumerate(lengths)]

    def whole(model, window):
        xs = [micro_batch(r, left[r][i]) for r, i in window]
        if sums:
            return sum(model(x).square().sum() for x in xs) / sum(model(x).numel() for x in xs)
        return sum(mean_loss(model, x) for x in xs) / len(xs)

    expected, end = train(small_model(), cut([len(one) for one in left], 3), whole, lr=0.05)
    if make is fsdp1:
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


@pytest.mark.parametrize("make", KINDS)
@pytest.mark.parametrize("loop", [over, over_unsized, sync_every])
def test_each_micro_batch_counts_once(ranks, make, loop):
    for lengths in ([3, 7], [8, 2], [1, 5], [4, 4], [6, 3]):
        replays = ranks(2).run(uneven, make, lengths, loop)
        assert replays == [max(lengths) - n for n in lengths]


@pytest.mark.parametrize("loop", [over, sync_every])
def test_sums_weigh_by_their_counts(ranks, loop):
    ranks(2).run(uneven, fsdp2, [3, 7], loop, True)


@pytest.mark.parametrize("loop", [over, sync_every])
@pytest.mark.parametrize("make", KINDS)
def test_a_nan_in_a_replay_leaves_no_trace(ranks, loop, make):
    """Its gradients are replaced by zeros at the parameters."""
    ranks(2).run(uneven, make, [7, 2], loop, False, True)


def test_loops_that_pass_over_items(ranks):
    ranks(2).run(uneven, fsdp2, [5, 8], over, False, False, [(0, 1), (1, 7), (1, 2)])
    ranks(2).run(uneven, fsdp2, [5, 8], over, False, False, [(0, 4), (1, 7), (1, 6), (1, 5)])


def skipping(bad: list) -> list:
    """A micro-batch that fails before the model is called is dropped on that rank alone."""
    rank = dist.get_rank()
    home = fsdp2()
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
    counts = ranks(2).run(skipping, bad)
    assert counts == [[sum(r == rank for r, _ in bad)] * 2 for rank in range(2)]


class Batch:
    """An object of the user's that holds data, which a replay keeps."""

    def __init__(self, x: torch.Tensor | None) -> None:
        self.x = x


class BatchWithModule(Batch):
    """One that holds more than data: a replay refers to it weakly."""

    def __init__(self, x: torch.Tensor | None) -> None:
        super().__init__(x)
        self.inside = [{"module": nn.Linear(1, 1)}]


def dropping_objects(epochs: int) -> None:
    """In the last epoch, the first micro-batch of rank 1 is dropped; the batch before it is gone by then."""
    rank, home = dist.get_rank(), fsdp2()
    optimizer = Recorder(home.parameters(), lr=0.05)

    @accumulating(steps=2, skip=ValueError)
    def step(home, optimizer, batch):
        if batch.x is None:
            raise ValueError
        return mean_loss(home, batch.x)

    bad = {(1, 4 * (epochs - 1) + (2 if epochs == 1 else 0))}
    for epoch in range(epochs):
        batches = (Batch(None if (rank, i) in bad else micro_batch(rank, i)) for i in range(4 * epoch, 4 * epoch + 4))
        for batch in batches if epochs == 1 else step.over(batches):
            step(home, optimizer, batch)
    assert step.progress.dropped == (rank == 1)
    windows = [[(r, i) for r in range(2) for i in (start, start + 1)] for start in range(0, 4 * epochs, 2)]
    windows = [[one for one in window if one not in bad] for window in windows]
    assert_equal_updates(optimizer.seen, train(small_model(), windows, window_mean, lr=0.05)[0], 1e-10)


@pytest.mark.parametrize("epochs", [1, 2])
def test_a_dropped_micro_batch_after_an_object(ranks, epochs):
    """In plain calls, and in a second loop over data."""
    ranks(2).run(dropping_objects, epochs, limit=15)


class Mode(Enum):
    TRAIN = 1


class Attributes(dict):
    """Its items are its attributes; one that it lacks is a KeyError."""

    __getattr__ = dict.__getitem__


@dataclass
class Record:
    x: object


X = torch.ones(2)
KEPT = [Record(X), Record(Mode.TRAIN), Record(torch.float64), Record(list(range(3000))), Record(int), Attributes(x=X)]
LET_GO = [Record(nn.Linear(1, 1)), Record({"a": [nn.Linear(1, 1)]}), Record(lambda: 0), Record(i for i in "ab"),
          Record({1: nn.Linear(1, 1)}.values()), Record(torch.optim.SGD([X], lr=1.0))]  # fmt: skip


@pytest.mark.parametrize("batch", range(len(KEPT)))
def test_a_replay_keeps_data(batch):
    replay = Replay(print, (copy.copy(KEPT[batch]),), {})
    assert not replay.is_alive
    again = copy.copy(KEPT[batch])
    replay = Replay(print, (again,), {})
    replay.keep_data()
    del again
    assert replay.is_alive


@pytest.mark.parametrize("batch", range(len(LET_GO)))
def test_a_replay_keeps_nothing_but_data(batch):
    one = copy.copy(LET_GO[batch])
    replay = Replay(print, (one,), {})
    replay.keep_data()
    del one
    assert not replay.is_alive


def fails_after_its_forward(home, x):
    mean_loss(home, x)
    raise ValueError


def dropping_too_late(loss, good: set[int], kind=Batch) -> str:
    """What each rank is told where `skip` cannot drop a micro-batch; the first is a good one on these ranks."""
    rank = dist.get_rank()
    home = fsdp2()
    optimizer = Recorder(home.parameters())

    @accumulating(steps=2, skip=ValueError, model=home, optimizer=optimizer)
    def step(batch):
        if batch.x is None:
            raise ValueError
        return loss(home, batch.x)

    try:
        step(kind(micro_batch(rank, 0) if rank in good else None))
        step(kind(None))
    except gradsync.GradSyncError as error:
        return str(error)
    return "no error"


AFTER_A_FORWARD = "only before its model is called, for the other ranks wait in the model's forward, but ValueError"


@pytest.mark.parametrize(
    ("loss", "good", "kind", "words"),
    [
        (fails_after_its_forward, {0, 1}, Batch, AFTER_A_FORWARD),
        (mean_loss, {0}, Batch, "must be a good one on every rank .* but rank 1 dropped it"),
        (mean_loss, {0, 1}, BatchWithModule, "repeats its last call .* no micro-batch to run, but an object .* is gone"),
    ],
    ids=["after its forward", "the first", "after a batch that is gone"],
)
def test_a_micro_batch_that_cannot_be_dropped(ranks, loss, good, kind, words):
    for text in ranks(2).run(dropping_too_late, loss, good, kind, limit=15):
        assert re.search(words, text), text


Named = namedtuple("Named", ["x", "weight"])


def other_arguments() -> None:
    """A named tuple, an object and a set among the arguments: a replay has them again."""
    rank, lengths = dist.get_rank(), [5, 2]
    home = fsdp2()
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


def an_empty_rank(make, loop, empty: tuple[int, ...] = (1,)) -> str:
    rank, home = dist.get_rank(), make()
    data = [] if rank in empty else [micro_batch(rank, 0)]
    try:
        loop(2, home, Recorder(home.parameters()), lambda x: mean_loss(home, x), data)
    except gradsync.GradSyncError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize("loop", [over, sync_every])
@pytest.mark.parametrize("make", [fsdp2, static_graph])
def test_a_rank_that_never_had_an_item_is_named_on_every_rank(ranks, make, loop):
    """A static graph needs one of each rank, too: its very first backward synchronises."""
    for text in ranks(2).run(an_empty_rank, make, loop):
        assert "needs at least one item in" in text and "rank 1 has none" in text, text


def test_no_item_on_any_rank_is_fine(ranks):
    for make in (fsdp2, static_graph):
        assert ranks(2).run(an_empty_rank, make, over, (0, 1)) == ["no error"] * 2


def taking_items_out(loop) -> None:
    """A body that takes its targets out of the batch, as those of transformers do; a replay gets it as it came."""
    rank, lengths = dist.get_rank(), [5, 2]
    home = fsdp2()
    optimizer = Recorder(home.parameters(), lr=0.05)
    data = [{"x": micro_batch(rank, i), "weight": 1.0} for i in range(lengths[rank])]
    loop(2, home, optimizer, lambda batch: mean_loss(home, batch.pop("x")) * batch.pop("weight"), data)
    expected, _ = train(small_model(), cut(lengths, 2), window_mean, lr=0.05)
    assert_equal_updates(optimizer.seen, expected, 1e-10)


@pytest.mark.parametrize("loop", [over, sync_every])
def test_a_body_that_takes_items_out_of_its_batch(ranks, loop):
    ranks(2).run(taking_items_out, loop, limit=15)


# -- turns of a loop, which give the windows that then stand in place of the open one, of which this turn is a part ---


def ordinary(step, x, window) -> list:
    step(x)
    return [window, []] if len(window) == 3 * dist.get_world_size() else [window]


def exception(step, x, window) -> list:
    with pytest.raises(TypeError):
        step(None)
    return [[]]


def flush(step, x, window) -> list:
    step(x)
    step.flush()
    return [window, []]


def reset(step, x, window) -> list:
    step(x)
    step.reset()
    return [[]]


def carried_after(special, at: int, make) -> None:
    """A window is discarded, or flushed, in the middle of a loop of known length: the next one is carried as it is."""
    rank = dist.get_rank()
    home = make()
    optimizer = Recorder(home.parameters(), lr=0.05)
    step = accumulating(steps=3, tail="carry", model=home, optimizer=optimizer)(lambda x: mean_loss(home, x))
    windows = [[]]
    for epoch, length in enumerate([7, 2]):
        for i in step.over(range(length)):
            index = 10 * epoch + i
            turn = special if index == at else ordinary
            window = windows.pop() + [(r, index) for r in range(dist.get_world_size())]
            windows += turn(step, micro_batch(rank, index), window)
    step.flush()
    expected, _ = train(small_model(), [one for one in windows if one], window_mean, lr=0.05)
    assert_equal_updates(optimizer.seen, expected)


@pytest.mark.parametrize(("turn", "at"), [(exception, 5), (flush, 4), (reset, 4)])
@pytest.mark.parametrize("make", [small_model, fsdp2])
def test_a_window_is_carried_after_another_was_discarded(ranks, turn, at, make):
    ranks(2).run(carried_after, turn, at, make, limit=15)


def nobody_fills(make, items, behind: bool) -> tuple[int, int]:
    """A window of four has had three calls at most as the data ends. A call behind the loop may close it."""
    rank, home = dist.get_rank(), make()
    optimizer = Recorder(home.parameters(), lr=0.05)
    step = accumulating(steps=4, tail="carry", model=home, optimizer=optimizer)(lambda x: mean_loss(home, x))
    for i in step.over(items[rank]):
        if i is not None:
            step(micro_batch(rank, i))
    found = step.progress.updates, step.progress.index
    if behind:
        step(micro_batch(rank, 9))
        window = [(r, i) for r in range(2) for i in [*iter(items[r]), 9] if i is not None]
        assert_equal_updates(optimizer.seen, train(small_model(), [window], window_mean, lr=0.05)[0], 1e-10)
    return found


THREE = [0, 1, 2]
SAYS_FOUR = Says(THREE, 4)


def loaded_and_filled(items) -> None:
    """A window that was carried out of a loop, on ranks that brought different numbers, is saved, loaded and filled."""
    rank, windows = dist.get_rank(), []
    for _ in range(2):
        home = fsdp2()
        optimizer = Recorder(home.parameters(), lr=0.05)
        windows.append((home, optimizer, accumulating(steps=4, tail="carry", model=home, optimizer=optimizer)))
    (home, _, decorate), (other, optimizer, decorate_other) = windows
    step = decorate(lambda x: mean_loss(home, x))
    for i in step.over(items[rank]):
        step(micro_batch(rank, i))
    step_other = decorate_other(lambda x: mean_loss(other, x))
    step_other.load_state_dict(step.state_dict())
    step.reset()
    step_other(micro_batch(rank, 9))
    window = [(r, i) for r in range(2) for i in [*items[r], 9]]
    assert_equal_updates(optimizer.seen, train(small_model(), [window], window_mean, lr=0.05)[0], 1e-10)


def test_a_window_that_was_carried_out_of_a_loop_is_loaded(ranks):
    ranks(2).run(loaded_and_filled, [THREE, [0, 1]], limit=15)


@pytest.mark.parametrize(
    "items",
    [
        [SAYS_FOUR, SAYS_FOUR], [SAYS_FOUR, [0, 1]], [SAYS_FOUR, Says([0, 1], 4)], [THREE, THREE],
        [THREE, [0, 1]], [[0, None, 1, 2]] * 2, [[0, 1, 2, None]] * 2,
    ],
)  # fmt: skip
def test_a_window_that_nobody_has_filled_is_carried(ranks, items):
    """Whatever lengths say, and though a rank may have repeated a call in it; behind the loop it closes exactly."""
    assert ranks(2).run(nobody_fills, fsdp2, items, True, limit=15) == [(0, 3), (0, 3)]
    came = ranks(2).run(nobody_fills, small_model, items, False, limit=15)
    assert came == [(0, sum(i is not None for i in iter(items[r]))) for r in range(2)]


def bare(model: nn.Module) -> nn.Module:
    return model


def calls_behind_the_loop(wrap, lengths: tuple[int, int], sync: str) -> None:
    """One rank's window is open behind the loop, and the other's is not; plain calls then fill both."""
    rank, model = dist.get_rank(), small_model()
    home = wrap(model)
    optimizer = Recorder(home.parameters(), lr=0.05)
    decorate = accumulating(steps=2, tail="carry", sync=sync, model=home, optimizer=optimizer)
    step = decorate(lambda x: mean_loss(home, x))
    for i in step.over(range(lengths[rank])):
        step(micro_batch(rank, i))
    for i in range(lengths[rank], 4):
        step(micro_batch(rank, i))
    assert_equal_updates(optimizer.seen, train(small_model(), cut((4, 4), 2), window_mean, lr=0.05)[0], 1e-10)


@pytest.mark.parametrize("lengths", [(3, 2), (1, 0), (1, 1)])
@pytest.mark.parametrize("wrap", [bare, DDP])
@pytest.mark.parametrize("sync", ["window", "each"])
def test_windows_that_are_open_on_some_ranks_behind_a_loop(ranks, wrap, lengths, sync):
    ranks(2).run(calls_behind_the_loop, wrap, lengths, sync, limit=15)
