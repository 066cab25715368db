"""A decorated step on any engine, and what its parameters have to be: what the rows of the table are made of."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

import gradsync
from gradsync.verify.compare import assert_equal_states
from gradsync.verify.models import net
from gradsync.verify.reference import mean_of, micro_batch, states

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from gradsync.verify.homes import Home
    from gradsync.verify.reference import Item, State

LR, DECAY = 0.1, 0.01


def data(rank: int, index: int) -> torch.Tensor:
    """A micro-batch, as the reference sees it."""
    return micro_batch(rank, index, rows=3, width=4)


def data_of(home: Home, index: int) -> torch.Tensor:
    """This rank's micro-batch, where its model is."""
    return data(home.rank, index).to(home.device, home.dtype)


def reference(
    home: Home,
    windows: Iterable[Iterable[int | Item]],
    weigh: Callable[[Any, list[Item]], torch.Tensor] | None = None,
    clip: float | None = None,
) -> list[State | torch.Tensor]:
    """The parameters after each update, where each window is one big batch.

    A window is what each rank has in it, or who has what: places, or (rank, place).
    """

    def mean(model: Any, items: list[Item]) -> torch.Tensor:
        return torch.stack([mean_of(model(data(*item))) for item in items]).sum() / len(items)

    model = net(unused=any("unused" in name for name in home.full()))
    return states(
        model, [items_of(window, home.size) for window in windows], weigh or mean, lr=LR, decay=DECAY, clip=clip
    )


def items_of(window: Iterable[int | Item], num_ranks: int) -> list[Item]:
    """Who has what in a window that every rank has alike."""
    items: list[Item] = []
    places: list[int] = []
    for one in window:
        if isinstance(one, tuple):
            items.append(one)
        else:
            places.append(one)
    return items or [(rank, index) for rank in range(num_ranks) for index in places]


def compare(home: Home, came: Sequence[Any], expected: Sequence[Any]) -> None:
    """Raise unless these states are those of the reference, to the tolerance of the home's arithmetic."""
    assert_equal_states([_in_float64(one) for one in came], expected, home.tolerance)


def _in_float64(state: Any) -> Any:
    if isinstance(state, dict):
        return {name: _in_float64(value) for name, value in state.items()}
    return state.cpu().double()


class Run:
    """A model on its engine under a decorated step, and what its parameters were after each update."""

    def __init__(
        self,
        home: Home,
        steps: int = 3,
        loss: Callable[[torch.Tensor, int], Any] | None = None,
        scaler: Any = None,
        *,
        named: bool = False,
        **options: Any,
    ) -> None:
        self.home = home
        self.states: list[Any] = []
        self.optimizer = optimizer_of(home)
        self.poisoned: int | None = None
        self.explode: int | None = None
        self.broken: set[int] = set()  # places of items that fail before the model is called
        self.only_first_after = 3  # places in a window until which both blocks are used

        if named:
            options |= {"model": home.model, "optimizer": self.optimizer}

        def train_step(model: Any, optimizer: Any, index: int) -> Any:  # noqa: ARG001 - the decorator takes it from here
            if index in self.broken:
                raise KeyError("broken item")
            poison = index == self.poisoned and home.rank == 0
            output = model(data_of(home, index), poison, only_first=index % 3 > self.only_first_after)
            if index == self.explode:
                raise KeyError("in the body")
            return loss(output, index) if loss else mean_of(output)

        train_step.__name__ = train_step.__qualname__ = "step"
        self.step: Any = gradsync.accumulating(steps, scaler=scaler, **{**home.options, **options})(train_step)

    def __call__(self, index: int) -> None:
        """One micro-batch."""
        before = self.step.progress.updates
        self.step(self.home.model, self.optimizer, index)
        self.note(before)

    def note(self, before: int) -> None:
        """Keep the parameters, if there was an update."""
        if self.step.progress.updates > before:
            self.states.append(self.home.full())

    def over(self, length: int, *, known: bool = True) -> None:
        """A loop over micro-batches 0, 1, ..."""
        before = 0
        for index in self.step.over(range(length) if known else iter(range(length))):
            before = self.step.progress.updates
            self.step(self.home.model, self.optimizer, index)
            self.note(before)
        if self.step.progress.updates > len(self.states):
            self.states.append(self.home.full())


def optimizer_of(home: Home) -> torch.optim.SGD:
    """SGD whose weight decay moves a parameter that has any gradient, if only zeros."""
    return torch.optim.SGD(home.model.parameters(), lr=LR, weight_decay=DECAY, foreach=home.foreach)
