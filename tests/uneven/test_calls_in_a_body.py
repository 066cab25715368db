"""A function that is called in the body of another one's loop, and is not of that loop: it counts on every rank."""

from __future__ import annotations

import pytest
import torch.distributed as dist

import gradsync
from tests.support.models import small_model
from tests.support.reference import cut, mean_loss, micro_batch, train, window_mean
from tests.support.verdicts import FullRecorder, compare, exact, on_engine, refused, verdict, verdicts

STEPS = 2


def made(engine: str):
    home = on_engine(small_model(unused=False), engine)
    optimizer = FullRecorder(home.parameters(), lr=0.1)
    step = gradsync.accumulating(STEPS, model=home, optimizer=optimizer)(lambda x: mean_loss(home, x))
    return home, optimizer, step


def plain_loop(home, optimizer, _):
    """`sync_every` with nothing to draw from, one micro-batch a turn."""
    windows = iter(gradsync.sync_every(home, STEPS))

    def turn(x) -> None:
        micro = next(windows)
        micro.backward(mean_loss(home, x))
        if micro.last:
            optimizer.step()
            optimizer.zero_grad()

    return turn


def a_function(_, __, step):
    return step


def over(home, optimizer, step, data):
    for x in step.over(data):
        step(x)
        yield x


def every(home, optimizer, step, data):
    for micro, x in gradsync.sync_every(home, STEPS, data):
        micro.backward(mean_loss(home, x))
        if micro.last:
            optimizer.step()
            optimizer.zero_grad()
        yield x


def called_inside(engines, loop, front, lengths: list[int], known, first: bool, before: bool):
    """`first`: the plain call comes before the loop's own; `before`: it has had a window before the loop."""
    rank = dist.get_rank()
    outer, inner = made(engines[0]), made(engines[1])
    call = front(*inner)
    windows = cut(lengths, STEPS)

    def run() -> None:
        if before:
            for index in range(STEPS):
                call(micro_batch(rank, index))
        data = [micro_batch(rank, index) for index in range(lengths[rank])]
        data = data if known else (x for x in data)
        if first:
            home, optimizer, step = outer
            for x in step.over(data):
                call(x)
                step(x)
        else:
            for x in loop(*outer, data):
                call(x)
        compare(outer[1].seen, train(small_model(unused=False), windows, window_mean, lr=0.1)[0])
        twice = [windows[0], *windows] if before else windows
        compare(inner[1].seen, train(small_model(unused=False), twice, window_mean, lr=0.1)[0])

    return verdict(run)


HOMES = [("bare", "bare"), ("ddp", "bare"), ("bare", "fsdp2"), ("fsdp2", "bare"), ("fsdp2", "fsdp2")]


@pytest.mark.parametrize(("known", "lengths"), [(True, [6, 6]), (False, [6, 6])])
@pytest.mark.parametrize("front", [a_function, plain_loop])
@pytest.mark.parametrize(("loop", "first"), [(over, False), (over, True), (every, False)])
@pytest.mark.parametrize("engines", HOMES, ids="-".join)
def test_in_a_loop_of_equally_many_items(ranks, engines, loop, front, known, lengths, first):
    exact(verdicts(ranks(2), called_inside, engines, loop, front, lengths, known, first, False))


@pytest.mark.parametrize(("known", "lengths"), [(True, [6, 4]), (False, [4, 6]), (False, [5, 3]), (True, [3, 4])])
@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize(("engines", "loop"), [*((both, over) for both in HOMES), *((both, every) for both in HOMES[:3])])
def test_in_a_loop_where_a_rank_has_run_out(ranks, engines, loop, lengths, known, before):
    """One process died in gloo: its share of a window met a gradient of the other function.

    On FSDP2, the body of `sync_every` runs in replays, too, with all that it calls.
    """
    said = verdicts(ranks(2), called_inside, engines, loop, a_function, lengths, known, False, before)
    refused(said, "in one loop at a time", "sync_every([model, other], ...)|a.over(b.over(data))")
