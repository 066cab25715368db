"""A loop over `sync_every` that is left in the middle of a window, and the next one."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from gradsync import sync_every, sync_gradients
from tests.support.models import small_model
from tests.support.reference import cut, micro_batch, train
from tests.support.verdicts import FullRecorder, compare, exact, on_engine, refused, verdict, verdicts

STEPS = 3


def items(number: int) -> list[torch.Tensor]:
    return [micro_batch(dist.get_rank(), i) for i in range(number)]


def by_break(home, optimizer, at: int) -> None:
    for step, x in sync_every(home, STEPS, items(6)):
        step.backward(home(x).square().mean())
        if step.index == at:
            break


def by_the_end_of_what_it_is_zipped_with(home, optimizer, at: int) -> None:
    for step, x in zip(sync_every(home, STEPS), items(at + 1)):
        step.backward(home(x).square().mean())


def by_an_exception(home, optimizer, at: int) -> None:
    with pytest.raises(ZeroDivisionError):
        for step, x in sync_every(home, STEPS, items(6)):
            step.backward(home(x).square().mean())
            if step.index == at:
                raise ZeroDivisionError


def by_an_exception_in_a_forward(home, optimizer, at: int) -> None:
    with pytest.raises(RuntimeError):
        for step, x in sync_every(home, STEPS, items(6)):
            step.backward(home(x[:, :1] if step.index == at else x).square().mean())


def by_an_exception_in_the_data(home, optimizer, at: int) -> None:
    def failing():
        yield from items(at + 1)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        for step, x in sync_every(home, STEPS, failing()):
            step.backward(home(x).square().mean())


def left(engine: str, how, at: int, drops: bool):
    home = on_engine(small_model(), engine)
    optimizer = FullRecorder(home.parameters())

    def run():
        how(home, optimizer, at)
        if drops:
            optimizer.zero_grad()
        for step, x in sync_every(home, STEPS, items(6)):
            step.backward(home(x).square().mean())
            if step.last:
                optimizer.step()
                optimizer.zero_grad()
        size = dist.get_world_size()
        expected, _ = train(small_model(), cut([6] * size, STEPS), lambda model, window: sum(
            model(micro_batch(r, i)).square().mean() for r, i in window) / len(window))  # fmt: skip
        compare(optimizer.seen, expected)

    return verdict(run)


def by_break_and_synchronised(home, optimizer, at: int) -> None:
    by_break(home, optimizer, at)
    sync_gradients(home)


def by_the_end_and_synchronised(home, optimizer, at: int) -> None:
    by_the_end_of_what_it_is_zipped_with(home, optimizer, at)
    sync_gradients(home)


LEFT = [by_break, by_the_end_of_what_it_is_zipped_with]
AFTER = dict(zip(LEFT, [by_break_and_synchronised, by_the_end_and_synchronised]))
RAISED = [by_an_exception, by_an_exception_in_a_forward, by_an_exception_in_the_data]
HOMES = [("bare", 1), ("bare", 2), ("ddp", 2), ("fsdp2", 2)]


@pytest.mark.parametrize("how", LEFT, ids=lambda one: one.__name__)
@pytest.mark.parametrize(("engine", "size"), HOMES)
def test_what_is_left_behind_is_not_in_the_next_window(ranks, engine, size, how):
    """The user drops it, or is told to; what FSDP2 keeps inside, no zero_grad drops."""
    refused(verdicts(ranks(size), left, engine, how, 1, False), "left in the middle of a window", "zero_grad")
    if engine == "fsdp2":
        refused(verdicts(ranks(size), left, engine, how, 1, True), "left in the middle", "sync_gradients")
        exact(verdicts(ranks(size), left, engine, AFTER[how], 1, True))
    else:
        exact(verdicts(ranks(size), left, engine, how, 1, True))


@pytest.mark.parametrize("how", RAISED, ids=lambda one: one.__name__)
@pytest.mark.parametrize(("engine", "size"), HOMES)
def test_an_exception_drops_the_open_window(ranks, engine, size, how):
    """With what is held, inside the engine too: the next loop begins anew, and is exact."""
    exact(verdicts(ranks(size), left, engine, how, 1, False))
