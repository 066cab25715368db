"""Where forwards communicate and lengths are unknown, ranks say a micro-batch early what they know of the next: exact."""

from __future__ import annotations

import itertools

import pytest
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

import gradsync
from gradsync.functional._loop.knowledge import LoopKnowledge
from tests.support.compare import assert_equal_updates
from tests.support.models import small_model
from tests.support.recorder import Recorder
from tests.support.reference import cut, mean_loss, micro_batch, train, window_mean
from tests.support.loops import over_unnamed, sync_every


def sharded():
    model = small_model()
    fully_shard(model)
    return model, Recorder(model.parameters())


def each_window(loop, steps: int, lengths: list[int]) -> int:
    """One epoch of these lengths; how often this rank ran a micro-batch again."""
    rank = dist.get_rank()
    model, optimizer = sharded()
    items = (micro_batch(rank, i) for i in range(lengths[rank]))
    replays = loop(steps, model, optimizer, lambda x: mean_loss(model, x), items)
    expected, _ = train(small_model(), cut(lengths, steps), window_mean)
    assert_equal_updates(optimizer.seen, expected)
    return replays


def all_lengths(loop, most: int) -> None:
    """Each length on each rank, with each window up to one longer than the data."""
    rank = dist.get_rank()
    for lengths in itertools.product(range(1, most + 1), repeat=dist.get_world_size()):
        for steps in range(1, most + 2):
            assert each_window(loop, steps, list(lengths)) == max(lengths) - lengths[rank], (lengths, steps)


@pytest.mark.parametrize("loop", [over_unnamed, sync_every])
def test_every_length_on_every_rank(ranks, loop):
    """Nobody hangs, each micro-batch counts once, and no rank repeats more than it must."""
    ranks(2).run(all_lengths, loop, 3, limit=60)
    assert ranks(3).run(each_window, loop, 3, [2, 5, 4]) == [3, 0, 1]


def several_epochs(tail: str, epochs: list[list[int]], windows: list) -> None:
    rank = dist.get_rank()
    model, optimizer = sharded()
    step = gradsync.accumulating(3, tail=tail)(lambda model, optimizer, x: mean_loss(model, x))
    for lengths in epochs:
        for x in step.over(micro_batch(rank, i) for i in range(lengths[rank])):
            step(model, optimizer, x)
    assert_equal_updates(optimizer.seen, train(small_model(), windows, window_mean)[0])


def test_a_tail_that_is_carried(ranks):
    """What no rank filled stays open, and the next loop goes on in it."""
    first, second = [4, 2], [2, 1]
    full, carried = cut(first, 3)
    rest = [(rank, index) for rank, length in enumerate(second) for index in range(length)]
    ranks(2).run(several_epochs, "carry", [first, second], [full, carried + rest])
    ranks(2).run(several_epochs, "carry", [[2, 5]], [[(0, 0), (0, 1), (1, 0), (1, 1), (1, 2)]])


def as_called(calls: list[list[int]], known: list[bool]) -> None:
    """So many calls come for each item, on each rank: windows count calls."""
    rank = dist.get_rank()
    model, optimizer = sharded()
    step = gradsync.accumulating(3)(lambda model, optimizer, x: mean_loss(model, x))
    numbers = itertools.count()
    items = calls[rank]
    for times in step.over(items if known[rank] else iter(items)):
        for _ in range(times):
            step(model, optimizer, micro_batch(rank, next(numbers)))
    assert_equal_updates(optimizer.seen, train(small_model(), cut([sum(one) for one in calls], 3), window_mean)[0])


CALLS = {
    "two for each": [[2, 2, 2], [2, 2, 2, 2]],
    "two for each on one rank": [[2, 2, 2], [1, 1]],
    "two at once": [[1, 1, 1, 1, 2, 1], [1, 1, 1]],
    "two at the last": [[1, 1, 1, 1, 1], [1, 1, 1, 2, 1, 1, 1]],
    "none in the middle": [[1, 1, 0, 1, 1, 1, 1], [1, 1, 1]],
    "none for the last": [[1, 1, 1, 1, 0], [1, 1, 1]],
    "none for the last on all ranks": [[1, 1, 1, 0], [1, 1, 1, 1, 0]],
    "none for some on all ranks": [[1, 0, 1, 0, 1, 0], [1, 1, 0, 0, 1, 1, 1, 1]],
}


@pytest.mark.parametrize("calls", CALLS.values(), ids=CALLS)
def test_calls_that_cannot_be_foreseen(ranks, calls):
    """A promise that is broken costs a repetition, and no exactness."""
    for known in ([False, False], [True, False]):
        ranks(2).run(as_called, calls, known)


def test_two_calls_at_the_last_item_but_one_that_cannot_be_foreseen(ranks):
    """But a length, once it is the only one left, is taken at its word."""
    ranks(2).run(as_called, [[1, 1, 1, 2, 1], [1, 1]], [False, False])


def failing(at: int) -> None:
    """A call fails on all ranks, and the loop goes on: its window is dropped, and what was said ahead still holds."""
    rank = dist.get_rank()
    model, optimizer = sharded()
    step = gradsync.accumulating(3)(lambda model, optimizer, x: mean_loss(model, x) / (0 if x is None else 1))
    lengths = [7, 8]
    for i in step.over(iter(range(lengths[rank]))):
        try:
            step(model, optimizer, None if i == at else micro_batch(rank, i))
        except (TypeError, AttributeError):
            assert i == at
    good = [[(r, at + 1 + i) for r, i in window] for window in cut([n - at - 1 for n in lengths], 3)]
    expected, _ = train(small_model(), [*cut([at - at % 3] * 2, 3), *good], window_mean)
    assert_equal_updates(optimizer.seen, expected)


@pytest.mark.parametrize("at", [1, 2, 3, 4])
def test_an_exception_on_all_ranks_in_the_middle(ranks, at):
    ranks(2).run(failing, at)


def drawn_ahead(lengths: list[int]) -> list[int]:
    rank, drawn = dist.get_rank(), []

    def items():
        for i in range(lengths[rank]):
            drawn.append(i)
            yield i

    model, optimizer = sharded()
    step = gradsync.accumulating(2)(lambda model, optimizer, x: mean_loss(model, x))
    seen = []
    for i in step.over(items()):
        seen.append(len(drawn) - i - 1)
        step(model, optimizer, micro_batch(rank, i))
    return seen


def test_two_items_are_drawn_ahead_once_it_is_known_that_forwards_communicate(ranks):
    assert ranks(2).run(drawn_ahead, [5, 3]) == [[1, 2, 2, 1, 0], [1, 1, 0]]


def counted(length: int) -> list[str]:
    """What is sent and read, in its order; micro-batches stand between."""
    said: list[str] = []
    send, rows, ask = LoopKnowledge.question, LoopKnowledge.answers, LoopKnowledge.ask

    def note(what, function):
        def noted(*args):
            said.append(what)
            return function(*args)

        return noted

    model, optimizer = sharded()
    step = gradsync.accumulating(2)(lambda model, optimizer, x: said.append("runs") or mean_loss(model, x))
    LoopKnowledge.question, LoopKnowledge.answers = note("asks", send), note("reads", rows)
    try:
        for i in step.over(iter(range(length))):
            step(model, optimizer, micro_batch(dist.get_rank(), i))
    finally:
        LoopKnowledge.question, LoopKnowledge.answers, LoopKnowledge.ask = send, rows, ask
    return said


def test_each_question_is_read_a_micro_batch_after_it_was_asked(ranks):
    """But for the first two calls, whose loop is not known yet; the last of a full window asks for nothing more."""
    now = ["asks", "reads"]
    for said in ranks(2).run(counted, 6):
        assert said == [
            *now, "runs", *now, "asks", "runs", *("reads", "asks", "runs") * 3, "reads", "runs",
        ]  # fmt: skip


def grows(window: int) -> int:
    return 1 + window % 3


@pytest.mark.parametrize("loop", [over_unnamed, sync_every])
@pytest.mark.parametrize("lengths", [[7, 7], [7, 2], [1, 8]])
def test_steps_that_are_a_function(ranks, loop, lengths):
    assert ranks(2).run(each_window, loop, grows, lengths, limit=30) == [max(lengths) - one for one in lengths]


def other_steps(lengths: list[int], is_known: bool) -> str:
    rank = dist.get_rank()
    model, optimizer = sharded()
    step = gradsync.accumulating(lambda window: 2 + rank * (window == 1))(lambda model, optimizer, x: mean_loss(model, x))
    items = [micro_batch(rank, i) for i in range(lengths[rank])]
    try:
        for x in step.over(items if is_known else iter(items)):
            step(model, optimizer, x)
    except gradsync.GradSyncError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize("is_known", [True, False])
@pytest.mark.parametrize("lengths", [[8, 8], [2, 8], [8, 4], [8, 3]])
def test_steps_that_differ_in_a_later_window(ranks, lengths, is_known):
    """Each rank would wait for the others somewhere else. A rank that has run out hears of it too."""
    for text in ranks(2).run(other_steps, lengths, is_known, limit=20):
        assert "same number of steps in a window, but rank 0 has 2, rank 1 has 3" in text, text
