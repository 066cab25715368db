"""What runs on the ranks for test_notice.py: windows that turn out not to be full, and who hears of it when."""

from __future__ import annotations

import threading

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

import gradsync
from gradsync import GradSyncError, LossSum, accumulating
from gradsync.functional import _listener
from tests.support.reference import Recorder, assert_equal_updates, mean_loss, micro_batch, small_model, sum_loss, train, window_mean

STEPS = 3


def scene(wrap: str):
    model = small_model()
    home = model if wrap == "bare" else DDP(model)
    return home, Recorder(model.parameters()), [micro_batch(dist.get_rank(), i) for i in range(12)]


def listeners() -> int:
    return sum(thread.name == "gradsync: listener" for thread in threading.enumerate())


def passing_over(wrap: str, how: str) -> None:
    """Loops that pass over items, each rank over others: lengths that all ranks know say nothing then."""
    home, optimizer, items = scene(wrap)
    passed_over = [{1, 5, 6}, {0, 1, 2, 3, 4, 5, 6}][dist.get_rank()]
    if how == "sync_every":
        # Its windows are of items: whoever passes over one that is not a boundary brings less.
        passed_over = [{1, 6}, {3, 4}][dist.get_rank()]
        for micro, x in gradsync.sync_every(home, STEPS, items[:8]):
            if micro.index + 3 * micro.window in passed_over:
                continue
            micro.backward(mean_loss(home, x))
            if micro.last:
                optimizer.step()
                optimizer.zero_grad()
        windows = [
            [(0, 0), (0, 2), (1, 0), (1, 1), (1, 2)],
            [(0, 3), (0, 4), (0, 5), (1, 5)],
            [(0, 7), (1, 6), (1, 7)],
        ]
    else:
        step = accumulating(steps=STEPS)(lambda home, optimizer, x: mean_loss(home, x))
        for i, x in enumerate(step.over(items[:10])):
            if i not in passed_over:
                step(home, optimizer, x)
        windows = [[(0, 0), (0, 2), (0, 3), (1, 7), (1, 8), (1, 9)], [(0, 4), (0, 7), (0, 8)], [(0, 9)]]
    expected, _ = train(small_model(), windows, window_mean)
    assert_equal_updates(optimizer.seen, expected)
    assert listeners() == 1


class Says:
    """Items, and a length that need not be theirs."""

    def __init__(self, items: list, length: int) -> None:
        self.items, self.length = items, length

    def __len__(self) -> int:
        return self.length

    def __iter__(self):
        return iter(self.items)


def wrong_lengths(wrap: str, how: str, said: list[int], true: list[int]) -> None:
    """A length is what the ranks expect, and no more than that."""
    home, optimizer, items = scene(wrap)
    rank = dist.get_rank()
    data = Says(items[: true[rank]], said[rank])
    if how == "sync_every":
        for micro, x in gradsync.sync_every(home, STEPS, data):
            micro.backward(mean_loss(home, x))
            if micro.last:
                optimizer.step()
                optimizer.zero_grad()
    else:
        step = accumulating(steps=STEPS)(lambda home, optimizer, x: mean_loss(home, x))
        for x in step.over(data):
            step(home, optimizer, x)
    windows = [
        [(r, i) for r in range(2) for i in range(start, min(start + STEPS, true[r]))]
        for start in range(0, max(true), STEPS)
    ]
    expected, _ = train(small_model(), windows, window_mean)
    assert_equal_updates(optimizer.seen, expected)


def calls_twice(wrap: str) -> None:
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


def left_early(wrap: str) -> None:
    """A loop that is left has given no notice, and the next one has its own."""
    home, optimizer, items = scene(wrap)
    step = accumulating(steps=STEPS)(lambda home, optimizer, x: mean_loss(home, x))
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
    assert listeners() == 1


def failing_as_another_gives_notice(wrap: str) -> str:
    """Rank 0 runs out in the very window in whose boundary's backward rank 1 fails: nobody waits for the other."""
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

    raised = ""
    for x in step.over(items[: [5, 9][rank]]):
        try:
            step(home, optimizer, x)
        except ZeroDivisionError as error:
            raised = str(error)
    assert listeners() == 1
    return raised


def kinds_that_change(wrap: str) -> str:
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


def many_loops(wrap: str) -> None:
    """What is kept of notices, here and in the store, does not grow; one that is still in use is not forgotten."""
    home, optimizer, items = scene(wrap)
    other, other_optimizer, _ = scene(wrap)
    step = accumulating(steps=1)(lambda home, optimizer, x: mean_loss(home, x))
    slow = accumulating(steps=1)(lambda home, optimizer, x: mean_loss(home, x))
    kept, _listener._KEPT = _listener._KEPT, 3
    for i, x in enumerate(slow.over(iter(items[: [4, 2][dist.get_rank()]]))):
        slow(other, other_optimizer, x)
        for _ in range(12 if i == 1 else 0):  # rank 1 has just given notice that its data has ended
            for y in step.over(iter(items[:2])):
                step(home, optimizer, y)
            assert len(_listener.listener(dist.group.WORLD, "").heard) <= 4
    _listener._KEPT = kept
    expected, _ = train(small_model(), [[(0, 0), (1, 0)], [(0, 1), (1, 1)], [(0, 2)], [(0, 3)]], window_mean)
    assert_equal_updates(other_optimizer.seen, expected)
    assert len(optimizer.seen) == 24


def a_store_of_ones_own(wrap: str) -> None:
    """A store that cannot be copied, so that nobody can listen: ranks tell each other of every window."""
    home, optimizer, items = scene(wrap)
    lengths = [5, 8]
    step = accumulating(steps=STEPS)(lambda home, optimizer, x: mean_loss(home, x))
    clone = dist.PrefixStore.clone
    group = dist.group.WORLD
    kept = _listener._LISTENERS.pop(group, None)  # which other tests have made
    before = listeners()

    def refuse(self):
        raise NotImplementedError

    dist.PrefixStore.clone = refuse
    try:
        for x in step.over(items[: lengths[dist.get_rank()]]):
            step(home, optimizer, x)
            assert listeners() == before
    finally:
        dist.PrefixStore.clone = clone
        if kept is not None:
            _listener._LISTENERS[group] = kept
    both = [(r, i) for i in range(3) for r in range(2)]
    windows = [both, [(r, i + 3) for r, i in both if i + 3 < lengths[r]], [(1, 6), (1, 7)]]
    expected, _ = train(small_model(), windows, window_mean)
    assert_equal_updates(optimizer.seen, expected)
