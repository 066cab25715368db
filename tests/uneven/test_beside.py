"""Two loops beside one another, on ranks with different numbers of items: one after another in the turns of one, or by turns."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import gradsync
from tests.support.models import small_model
from tests.support.reference import cut, mean_loss, micro_batch, train, window_mean
from tests.support.verdicts import FullRecorder, compare, exact, on_engine, refused, verdict, verdicts

STEPS = 2


class ByCalls:
    """A model with its optimizer, and a function that trains it over some items of this rank."""

    def __init__(self, engine: str) -> None:
        self.home = on_engine(small_model(unused=False), engine)
        self.optimizer = FullRecorder(self.home.parameters(), lr=0.1)
        self.step = gradsync.accumulating(steps=STEPS, model=self.home, optimizer=self.optimizer)(self.loss)

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        return mean_loss(self.home, x)

    def data(self, length: int) -> list[torch.Tensor]:
        return [micro_batch(dist.get_rank(), i) for i in range(length)]

    def loop(self, length: int):
        return self.step.over(self.data(length))

    def turn(self, came) -> None:
        self.step(came)


class BySyncEvery(ByCalls):
    """The same, by a loop of `sync_every`."""

    def loop(self, length: int):
        return gradsync.sync_every(self.home, STEPS, self.data(length))

    def turn(self, came) -> None:
        step, x = came
        step.backward(self.loss(x))
        if step.last:
            self.optimizer.step()
            self.optimizer.zero_grad()


def zipped(first, second, outer: int, inner: int) -> None:
    for one, other in zip(first.loop(outer), second.loop(inner)):
        first.turn(one)
        second.turn(other)


def nested(first, second, outer: int, inner: int) -> None:
    for one in first.loop(outer):
        first.turn(one)
        for other in second.loop(inner):
            second.turn(other)


def beside(engine: str, front, both, outer: list[int], inner: list[int]):
    rank = dist.get_rank()
    first, second = front(engine), front(engine)

    def run() -> None:
        both(first, second, outer[rank], inner[rank])
        expected = train(small_model(unused=False), cut(outer, STEPS), window_mean, lr=0.1)[0]
        compare(first.optimizer.seen, expected)
        assert len(second.optimizer.seen) == len(cut(inner, STEPS)) * (max(outer) if both is nested else 1)

    return verdict(run)


FRONTS = pytest.mark.parametrize("front", [BySyncEvery, ByCalls])


@pytest.mark.parametrize(
    ("both", "outer", "inner"), [(zipped, [6, 4], [6, 4]), (nested, [6, 4], [3, 3]), (nested, [6, 4], [3, 2])]
)
@FRONTS
@pytest.mark.parametrize("engine", ["bare", "ddp"])
def test_a_loop_in_the_middle_of_an_uneven_one(ranks, engine, front, both, outer, inner):
    """A rank that has run out would send its share of one loop where the others send that of the other."""
    said = verdicts(ranks(2), beside, engine, front, both, outer, inner)
    refused(said, "in one loop at a time", "sync_every([model, other], ...)|a.over(b.over(data))")


@pytest.mark.parametrize(
    ("both", "outer", "inner"), [(zipped, [6, 6], [6, 6]), (nested, [4, 4], [3, 3]), (nested, [4, 4], [3, 2])]
)
@FRONTS
@pytest.mark.parametrize("engine", ["bare", "ddp"])
def test_a_loop_in_the_middle_of_an_even_one(ranks, engine, front, both, outer, inner):
    exact(verdicts(ranks(2), beside, engine, front, both, outer, inner))


def after_one_that_was_left(front):
    """A loop that was left, though its iterator is still there, is beside nothing."""
    rank, (first, second) = dist.get_rank(), (front("bare") for _ in range(2))

    def leave() -> object:
        left = iter(first.loop(6 - 2 * rank))
        first.turn(next(left))
        return left

    def run() -> None:
        left = leave()
        for came in second.loop(6 - 2 * rank):
            second.turn(came)
        compare(second.optimizer.seen, train(small_model(unused=False), cut([6, 4], STEPS), window_mean, lr=0.1)[0])
        del left

    return verdict(run)


@FRONTS
def test_a_loop_after_one_that_was_left(ranks, front):
    exact(verdicts(ranks(2), after_one_that_was_left, front))
