"""What stands around `.over`: read-aheads, zips, threads, a call more, a loop that is left."""

from __future__ import annotations

import gc
import queue
import threading
import warnings
from collections import deque

import pytest
import torch.distributed as dist

import gradsync
from tests.support.models import small_model
from tests.support.reference import cut, mean_loss, micro_batch, train, window_mean
from tests.support.verdicts import (
    NOT_SHARDED, FullRecorder, compare, exact, exact_or_refused, in_turn, items_of_rank, on_engine, refused, verdict,
    verdicts,
)  # fmt: skip

HOMES = [*((one, 2) for one in NOT_SHARDED), ("bare", 1), ("bare", 3)]


def made(engine: str, steps: int = 3):
    home = on_engine(small_model(), engine)
    optimizer = FullRecorder(home.parameters())
    return gradsync.accumulating(steps=steps)(lambda model, optimizer, x: mean_loss(model, x)), home, optimizer


def unsized(items):
    yield from items


def ahead(items, num: int):
    """A generator that reads `num` items ahead."""
    waiting = deque()
    for item in items:
        waiting.append(item)
        if len(waiting) > num:
            yield waiting.popleft()
    yield from waiting


def by_thread(items, num: int):
    """A thread that reads `num` items ahead, as prefetchers do; what it raises comes out here."""
    waiting, end = queue.Queue(maxsize=num), object()

    def read():
        try:
            for item in items:
                waiting.put((item, None))
            waiting.put((end, None))
        except BaseException as error:
            waiting.put((end, error))

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    while True:
        item, error = waiting.get(timeout=15)
        if error is not None:
            raise error
        if item is end:
            return
        yield item


READERS = {
    "list": lambda items: list(items),
    "one ahead": lambda items: ahead(items, 1),
    "three ahead": lambda items: ahead(items, 3),
    "a thread": lambda items: by_thread(items, 2),
}


def read_around(engine: str, reader: str, known: bool, length: int):
    step, home, optimizer = made(engine)

    def run():
        data = items_of_rank([length] * dist.get_world_size())
        for x in READERS[reader](step.over(data if known else unsized(data))):
            step(home, optimizer, x)
        windows = cut([length] * dist.get_world_size(), 3)
        compare(optimizer.seen, train(small_model(), windows, window_mean)[0])

    try:
        return verdict(run)
    finally:
        step.reset()


@pytest.mark.parametrize("length", [7, 6])
@pytest.mark.parametrize("known", [True, False], ids=["known", "unknown"])
@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize(("engine", "size"), [("bare", 1), ("bare", 2), ("ddp", 2)])
def test_a_read_ahead_around_over(ranks, engine, size, reader, known, length):
    """The calls come later than their items, so `.over` takes the wrong ones for the last: it belongs inside.

    Where the data fills its windows the gradients might come out right; the contract calls the loop an error all the
    same, since the next epoch's length decides whether they do.
    """
    refused(verdicts(ranks(size), read_around, engine, reader, known, length), "over", "inside|ahead|prefetch")


def read_inside(engine: str, reader: str):
    step, home, optimizer = made(engine)
    size = dist.get_world_size()
    lengths = [7, 4, 5][:size]

    def run():
        for x in step.over(READERS[reader](items_of_rank(lengths))):
            step(home, optimizer, x)
        compare(optimizer.seen, train(small_model(), cut(lengths, 3), window_mean)[0])

    return verdict(run)


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize(("engine", "size"), [("bare", 1), ("bare", 2), ("ddp", 2)])
def test_a_read_ahead_inside_over(ranks, engine, size, reader):
    exact(verdicts(ranks(size), read_inside, engine, reader))


# -- several loops of one function ----------------------------------------------------------------------------------


def zipped(engine: str, num: int, calls: int):
    """Two `.over`s of one function at once, and then an ordinary loop."""
    step, home, optimizer = made(engine)
    size, rank = dist.get_world_size(), dist.get_rank()
    firsts, seconds = range(num), range(num, 2 * num)

    def both():
        for a, b in zip(step.over(firsts), step.over(seconds)):
            step(home, optimizer, micro_batch(rank, a))
            if calls == 2:
                step(home, optimizer, micro_batch(rank, b))
        order = [i for pair in zip(firsts, seconds) for i in pair] if calls == 2 else list(firsts)
        windows = [[(r, order[i]) for r, i in window] for window in cut([len(order)] * size, 3)]
        compare(optimizer.seen, train(small_model(), windows, window_mean)[0])

    said = verdict(both)
    if said.kind == "refused":
        step.reset()

    def afterwards():
        getattr(home, "module", home).load_state_dict(small_model().state_dict())
        optimizer.seen = []
        for x in step.over(items_of_rank([5] * size)):
            step(home, optimizer, x)
        compare(optimizer.seen, train(small_model(), cut([5] * size, 3), window_mean)[0])

    return said, verdict(afterwards)


def test_a_loop_that_is_closed_after_a_later_one_began():
    """The calls still belong to the later loop, whose last item closes the window."""
    step, model, optimizer = made("bare", steps=3)
    first, second = iter(step.over(range(5))), iter(step.over(range(2)))
    next(first)
    for i in second:
        first.close()
        step(model, optimizer, micro_batch(0, i))
    assert len(optimizer.seen) == 1
    compare(optimizer.seen, train(small_model(), cut([2], 3), window_mean)[0])


@pytest.mark.parametrize("calls", [2, 1], ids=["a call for each", "a call for both"])
@pytest.mark.parametrize("num", [3, 4])
@pytest.mark.parametrize(("engine", "size"), HOMES)
def test_a_zip_of_two_overs(ranks, engine, size, num, calls):
    """Two loops of one function at once are exact or an error, and the loop after them is as ever.

    The contract is silent on which. Exact would be: windows count the calls.
    """
    outcome = ranks(size).outcomes(zipped, engine, num, calls, limit=45)
    assert all(ok for ok, _ in outcome), outcome
    exact_or_refused([said for _, (said, _) in outcome])
    exact([after for _, (_, after) in outcome])


def in_threads(engine: str, lengths_of_threads):
    """One function in two threads, each with its model, its optimizer and its loop."""
    step = gradsync.accumulating(steps=3)(lambda model, optimizer, x: mean_loss(model, x))
    size, rank = dist.get_world_size(), dist.get_rank()
    homes = [on_engine(small_model(), engine) for _ in lengths_of_threads]
    optimizers = [FullRecorder(home.parameters()) for home in homes]

    def loop(me, num):
        for i in step.over(range(num)):
            step(homes[me], optimizers[me], micro_batch(rank, i))
            yield

    def run():
        in_turn(*(loop(me, num) for me, num in enumerate(lengths_of_threads)))
        for num, optimizer in zip(lengths_of_threads, optimizers, strict=True):
            compare(optimizer.seen, train(small_model(), cut([num] * size, 3), window_mean)[0])

    return verdict(run)


@pytest.mark.parametrize("lengths", [(4, 7), (7, 4), (5, 5)], ids=str)
@pytest.mark.parametrize(("engine", "size"), [("bare", 1), ("bare", 2), ("ddp", 2)])
def test_one_function_in_two_threads(ranks, engine, size, lengths):
    """One thread's last item closes that thread's window; the threads take turns, so that every rank does the same.

    A window belongs to (function, optimizers), so exact is what a user expects on one rank; on several, threads that
    share a process group may also be refused.
    """
    (exact if size == 1 else exact_or_refused)(verdicts(ranks(size), in_threads, engine, lengths))


# -- a call more ----------------------------------------------------------------------------------------------------


def once_more(engine: str, num: int, known: bool):
    """The last item is called with twice, say for a sample that counts double."""
    step, home, optimizer = made(engine)
    size, rank = dist.get_world_size(), dist.get_rank()

    def run():
        for i in step.over(range(num) if known else unsized(range(num))):
            for _ in range(2 if i + 1 == num else 1):
                step(home, optimizer, micro_batch(rank, i))
        assert step.progress.index == 0, f"a window is left open: {step.progress}"
        order = [*range(num), num - 1]
        apart = [*cut([num] * size, 3), [(r, num) for r in range(size)]]
        allowed = [apart, cut([num + 1] * size, 3)]
        windows = next(one for one in allowed if len(one) == len(optimizer.seen) or one is allowed[-1])
        windows = [[(r, order[i]) for r, i in window] for window in windows]
        compare(optimizer.seen, train(small_model(), windows, window_mean)[0])

    try:
        return verdict(run)
    finally:
        step.reset()


@pytest.mark.parametrize("known", [True, False], ids=["known", "unknown"])
@pytest.mark.parametrize("num", [4, 6])
@pytest.mark.parametrize(("engine", "size"), HOMES)
def test_one_more_call_on_the_last_item(ranks, engine, size, num, known):
    """It is in the last window or in one of its own, which the end of the data closes: the same on 1, 2 and 3 ranks."""
    exact_or_refused(verdicts(ranks(size), once_more, engine, num, known))


# -- loops that are left --------------------------------------------------------------------------------------------


def by_break(step, items, call, at: int) -> None:
    for i, x in enumerate(step.over(items)):
        call(x)
        if i == at:
            break


def by_return(step, items, call, at: int) -> None:
    for i, x in enumerate(step.over(items)):
        call(x)
        if i == at:
            return


def by_an_error(step, items, call, at: int) -> None:
    for i, x in enumerate(step.over(items)):
        call(x)
        if i == at:
            raise KeyError("the user's own")


def left(engine: str, leave, at: int):
    step, home, optimizer = made(engine)
    items = items_of_rank([7] * dist.get_world_size())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        gc.collect()  # functions of other cases that left a window open speak now
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            leave(step, items, lambda x: step(home, optimizer, x), at)
        except KeyError as error:
            error.__traceback__ = None
        gc.collect()
        said = [str(one.message) for one in caught if issubclass(one.category, RuntimeWarning)]
        where = [one.filename for one in caught if issubclass(one.category, RuntimeWarning)]
    index = step.progress.index
    step.flush()
    expected = train(small_model(), cut([at + 1] * dist.get_world_size(), 3), window_mean)[0]
    return said, where, index, verdict(lambda: compare(optimizer.seen, expected))


@pytest.mark.parametrize("at", [3, 4, 5])
@pytest.mark.parametrize("leave", [by_break, by_return, by_an_error])
@pytest.mark.parametrize(("engine", "size"), [("bare", 1), ("bare", 2), ("ddp", 2)])
def test_a_loop_that_is_left_early(ranks, engine, size, leave, at):
    """The open window stays and can be flushed; a warning names `flush` and `reset`, and comes from no file of torch.

    A window that has just closed is no reason for a word; neither is an error, which says enough by itself.
    """
    said = ranks(size).run(left, engine, leave, at, limit=45)
    for texts, files, index, after in said:
        assert index == (at + 1) % 3
        exact([after])
        if index and leave is not by_an_error:
            assert len(texts) == 1, f"{leave.__name__} at {at} said {texts}"
            assert "flush" in texts[0] and "reset" in texts[0], texts
            assert not any("weakref.py" in file or "/torch/" in file for file in files), files
        else:
            assert not texts, f"{leave.__name__} at {at} said {texts}"
