"""A decorated step on any engine, and what its parameters have to be: what the tables of scenarios are made of."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import gradsync
from tests.support.homes import Home, home_of
from tests.support.models import net
from tests.support.reference import mean_of, micro_batch, states

LR, DECAY = 0.1, 0.01


def data(rank: int, index: int) -> torch.Tensor:
    return micro_batch(rank, index, rows=3, width=4)


def reference(home: Home, windows, weigh=None, clip=None) -> list[dict[str, torch.Tensor]]:
    """The parameters after each update, where each window is one big batch.

    A window is what each rank has in it, or who has what: places, or (rank, place).
    """

    def mean(model, items):
        return sum(mean_of(model(data(*item))) for item in items) / len(items)

    model = net(unused=any("unused" in name for name in home.full()))
    return states(model, [items_of(window, home.size) for window in windows], weigh or mean, LR, DECAY, clip)


def items_of(window, num_ranks: int) -> list[tuple[int, int]]:
    """Who has what in a window that every rank has alike."""
    items = [one for one in window if isinstance(one, tuple)]
    return items or [(rank, index) for rank in range(num_ranks) for index in window]


class Run:
    """A model on its engine under a decorated step, and what its parameters were after each update."""

    def __init__(self, home: Home, steps: int = 3, loss=None, scaler=None, named=False, **options) -> None:
        self.home, self.states = home, []
        self.optimizer = torch.optim.SGD(
            home.model.parameters(), lr=LR, weight_decay=DECAY, foreach=home.foreach
        )
        self.poisoned = self.explode = None
        self.broken: set[int] = set()  # places of items that fail before the model is called
        self.only_first_after = 3  # places in a window until which both blocks are used

        if named:
            options |= {"model": home.model, "optimizer": self.optimizer}

        @gradsync.accumulating(steps, scaler=scaler, **{**home.options, **options})
        def step(model, optimizer, index):
            if index in self.broken:
                raise KeyError("broken item")
            poison = index == self.poisoned and home.rank == 0
            output = model(data(home.rank, index), poison, only_first=index % 3 > self.only_first_after)
            if index == self.explode:
                raise KeyError("in the body")
            return loss(output, index) if loss else mean_of(output)

        self.step = step

    def __call__(self, index: int) -> None:
        before = self.step.progress.updates
        self.step(self.home.model, self.optimizer, index)
        self.note(before)

    def note(self, before: int) -> None:
        if self.step.progress.updates > before:
            self.states.append(self.home.full())

    def over(self, length: int, known: bool = True) -> None:
        before = 0
        for index in self.step.over(range(length) if known else iter(range(length))):
            before = self.step.progress.updates
            self.step(self.home.model, self.optimizer, index)
            self.note(before)
        if self.step.progress.updates > len(self.states):
            self.states.append(self.home.full())


def cell(engine: str, scenario: Callable[[Home], None], error: str | None, unused: bool = False) -> None:
    """One cell of a table: the scenario on the engine ends as its reference does, or in the error that stands there."""
    home = home_of(engine, unused=unused)
    if error is None:
        scenario(home)
    else:
        with pytest.raises((gradsync.GradSyncError, RuntimeError), match=error):
            scenario(home)
