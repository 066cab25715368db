"""Lengths that all ranks know, and loops that do something else."""

from __future__ import annotations

import pytest
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

import gradsync
from gradsync import GradSyncError, LossSum, accumulating
from tests.support.compare import assert_equal_updates
from tests.support.items import Says
from tests.support.models import small_model
from tests.support.programs import TORCHRUN
from tests.support.recorder import Recorder
from tests.support.reference import mean_loss, micro_batch, sum_loss, train, window_mean
from tests.support.loops import over_unnamed, sync_every

STEPS = 3


def bare(model):
    return model


WRAPS = [bare, DDP]


def scene(wrap):
    model = small_model()
    return wrap(model), Recorder(model.parameters()), [micro_batch(dist.get_rank(), i) for i in range(12)]


def passing_over(wrap, loop, length: int, passed_over: list[set[int]], windows: list) -> None:
    home, optimizer, items = scene(wrap)
    data = [None if i in passed_over[dist.get_rank()] else x for i, x in enumerate(items[:length])]
    loop(STEPS, home, optimizer, lambda x: mean_loss(home, x), data)
    expected, _ = train(small_model(), windows, window_mean)
    assert_equal_updates(optimizer.seen, expected)


@pytest.mark.parametrize("wrap", WRAPS)
def test_loops_of_over_that_pass_over_items(ranks, wrap):
    """Each rank passes over others: lengths that all ranks know say nothing then."""
    windows = [[(0, 0), (0, 2), (0, 3), (1, 7), (1, 8), (1, 9)], [(0, 4), (0, 7), (0, 8)], [(0, 9)]]
    ranks(2).run(passing_over, wrap, over_unnamed, 10, [{1, 5, 6}, {0, 1, 2, 3, 4, 5, 6}], windows)


@pytest.mark.parametrize("wrap", WRAPS)
def test_loops_of_sync_every_that_pass_over_items(ranks, wrap):
    """Its windows are of items: whoever passes over one that is not a boundary brings less."""
    windows = [
        [(0, 0), (0, 2), (1, 0), (1, 1), (1, 2)],
        [(0, 3), (0, 4), (0, 5), (1, 5)],
        [(0, 7), (1, 6), (1, 7)],
    ]
    ranks(2).run(passing_over, wrap, sync_every, 8, [{1, 6}, {3, 4}], windows)


def wrong_lengths(wrap, loop, said: list[int], true: list[int]) -> None:
    """A length is what the ranks expect, and no more than that."""
    home, optimizer, items = scene(wrap)
    rank = dist.get_rank()
    loop(STEPS, home, optimizer, lambda x: mean_loss(home, x), Says(items[: true[rank]], said[rank]))
    windows = [
        [(r, i) for r in range(2) for i in range(start, min(start + STEPS, true[r]))]
        for start in range(0, max(true), STEPS)
    ]
    expected, _ = train(small_model(), windows, window_mean)
    assert_equal_updates(optimizer.seen, expected)


@pytest.mark.parametrize("wrap", WRAPS)
@pytest.mark.parametrize("loop", [over_unnamed, sync_every])
@pytest.mark.parametrize(("said", "true"), [([8, 8], [5, 8]), ([9, 9], [9, 1]), ([7, 9], [4, 4])])
def test_fewer_items_than_the_length_says(ranks, wrap, loop, said, true):
    ranks(2).run(wrong_lengths, wrap, loop, said, true)


def more_than_said(wrap, loop) -> None:
    """The windows that were known are exact; what comes beyond is an error before its window."""
    with pytest.raises(GradSyncError, match="no more items than its length says, but this one of length 5"):
        wrong_lengths(wrap, loop, [5, 5], [8, 8])


@pytest.mark.parametrize("wrap", WRAPS)
@pytest.mark.parametrize("loop", [over_unnamed, sync_every])
def test_more_items_than_the_length_says(ranks, wrap, loop):
    ranks(2).run(more_than_said, wrap, loop)


def calls_twice(wrap) -> None:
    """Two calls an item on one rank, one on the other: neither's length says how many micro-batches it has."""
    home, optimizer, items = scene(wrap)
    rank = dist.get_rank()
    step = accumulating(steps=STEPS)(lambda home, optimizer, x: mean_loss(home, x))
    for i, x in enumerate(step.over(items[:4])):
        step(home, optimizer, x)
        if rank == 0:
            step(home, optimizer, items[i + 4])
    mine = [[0, 4, 1, 5, 2, 6, 3, 7], [0, 1, 2, 3]]
    windows = [[(r, i) for r in range(2) for i in mine[r][start : start + STEPS]] for start in (0, 3, 6)]
    expected, _ = train(small_model(), windows, window_mean)
    assert_equal_updates(optimizer.seen, expected)


@pytest.mark.parametrize("wrap", WRAPS)
def test_a_rank_that_calls_twice_an_item(ranks, wrap):
    ranks(2).run(calls_twice, wrap)


def left_early(wrap) -> None:
    """What a loop that is left would have done says nothing of the next."""
    home, optimizer, items = scene(wrap)
    step = accumulating(steps=STEPS)(lambda home, optimizer, x: mean_loss(home, x))
    with pytest.warns(RuntimeWarning, match="was left with a window open"):
        for i, x in enumerate(step.over(items)):
            step(home, optimizer, x)
            if i == 4:
                break
    lengths = [4, 3]  # on from two held micro-batches
    for x in step.over(items[5 : 5 + lengths[dist.get_rank()]]):
        step(home, optimizer, x)
    windows = [[(r, i) for i in part for r in range(2)] for part in ((0, 1, 2), (3, 4, 5), (6, 7))]
    expected, _ = train(small_model(), [*windows[:2], [*windows[2], (0, 8)]], window_mean)
    assert_equal_updates(optimizer.seen, expected)


@pytest.mark.parametrize("wrap", WRAPS)
def test_a_loop_that_is_left_early(ranks, wrap):
    ranks(2).run(left_early, wrap)


def failing_as_another_runs_out(wrap) -> list[str]:
    """Rank 0 runs out in the very window in whose boundary's backward rank 1 fails: nobody waits for the other.

    Rank 1 has missed the update that rank 0 made, which the next boundary tells.
    """
    home, optimizer, items = scene(wrap)
    rank = dist.get_rank()
    calls = 0

    @accumulating(steps=STEPS)
    def step(home, optimizer, x):
        nonlocal calls
        calls += 1
        loss = mean_loss(home, x)
        if rank == 1 and calls == 6:
            loss.register_hook(lambda _: 1 / 0)
        return loss

    raised = []
    try:
        for x in step.over(items[: [5, 9][rank]]):
            try:
                step(home, optimizer, x)
            except ZeroDivisionError as error:
                raised.append(str(error))
    except gradsync.GradSyncError as error:
        raised.append(str(error))
    return raised


@pytest.mark.parametrize("wrap", WRAPS)
def test_a_rank_that_fails_as_another_runs_out(ranks, wrap):
    (told,), (raised, told_too) = ranks(2).run(failing_as_another_runs_out, wrap)
    assert raised == "division by zero"
    assert "rank 0 has 2, rank 1 has 1. A boundary failed on the rank that has fewer" in told
    assert told_too == told


def kinds_that_change(wrap) -> str:
    """One rank returns a LossSum all of a sudden: an error on every rank, and no table that only one of them sends."""
    home, optimizer, items = scene(wrap)
    rank = dist.get_rank()
    calls = 0

    @accumulating(steps=STEPS)
    def step(home, optimizer, x):
        nonlocal calls
        calls += 1
        return LossSum(sum_loss(home, x), x.numel()) if rank == 1 and calls > 3 else mean_loss(home, x)

    try:
        for x in step.over(items):
            step(home, optimizer, x)
    except GradSyncError as error:
        return f"after {step.progress.updates} updates: {error}"
    return "nothing"


@pytest.mark.parametrize("wrap", WRAPS)
def test_a_kind_of_loss_that_changes_on_one_rank(ranks, wrap):
    for text in ranks(2).run(kinds_that_change, wrap):
        assert text.startswith("after 1 updates") and "rank 0 has a mean, rank 1 has a LossSum" in text


def many_loops(wrap) -> None:
    """Loops inside a loop in which one rank has run out: nothing of one is taken for the other's."""
    home, optimizer, items = scene(wrap)
    other, other_optimizer, _ = scene(wrap)
    step = accumulating(steps=1)(lambda home, optimizer, x: mean_loss(home, x))
    slow = accumulating(steps=1)(lambda home, optimizer, x: mean_loss(home, x))
    for i, x in enumerate(slow.over(iter(items[: [4, 2][dist.get_rank()]]))):
        slow(other, other_optimizer, x)
        for _ in range(12 if i == 1 else 0):  # rank 1's data has ended
            for y in step.over(iter(items[:2])):
                step(home, optimizer, y)
    expected, _ = train(small_model(), [[(0, 0), (1, 0)], [(0, 1), (1, 1)], [(0, 2)], [(0, 3)]], window_mean)
    assert_equal_updates(other_optimizer.seen, expected)
    expected, _ = train(small_model(), [[(0, 0), (1, 0)], [(0, 1), (1, 1)]] * 12, window_mean)
    assert_equal_updates(optimizer.seen, expected)


@pytest.mark.parametrize("wrap", WRAPS)
def test_many_loops(ranks, wrap):
    ranks(2).run(many_loops, wrap)


LATE = """
import time, torch
import gradsync

@gradsync.accumulating(steps=2)
def train_step(model, optimizer, x):
    return model(x).sum()

with gradsync.process_group() as world:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    time.sleep(2.5 * world.rank)  # the other one waits at the store
    for i, x in enumerate(train_step.over(iter(torch.ones(6, 3, 2)))):
        if i == 3:
            time.sleep(1.5 * world.rank)  # and once more, in the middle of a window
        train_step(model, optimizer, x)
print(train_step.progress.updates)
"""


def test_waiting_is_silent(programs, tmp_path):
    """torch prints a warning for each wait at a TCPStore that ends in vain: no rank polls it."""
    (tmp_path / "late.py").write_text(LATE)
    code, printed, complaints = programs.run(*TORCHRUN, str(tmp_path / "late.py"))
    assert (code, printed.count("3"), complaints) == (0, 2, "")
