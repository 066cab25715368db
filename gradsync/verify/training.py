"""A decorated step on any engine, and the parameters that it must reach: the rows of the table use both."""

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
    """A micro-batch, for the reference."""
    return micro_batch(rank, index, rows=3, width=4)


def data_of(home: Home, index: int) -> torch.Tensor:
    """This rank's micro-batch, on the device and in the dtype of its model."""
    return data(home.rank, index).to(home.device, home.dtype)


def reference(
    home: Home,
    windows: Iterable[Iterable[int | Item]],
    weigh: Callable[[Any, list[Item]], torch.Tensor] | None = None,
    clip: float | None = None,
) -> list[State | torch.Tensor]:
    """The parameters after each update, if each window is one big batch.

    A window has places, which mean the micro-batches of all ranks there, or (rank, place) pairs.
    """

    def mean(model: Any, items: list[Item]) -> torch.Tensor:
        return torch.stack([mean_of(model(data(*item))) for item in items]).sum() / len(items)

    model = net(unused=any("unused" in name for name in home.full()))
    return states(
        model, [items_of(window, home.size) for window in windows], weigh or mean, lr=LR, decay=DECAY, clip=clip
    )


def items_of(window: Iterable[int | Item], num_ranks: int) -> list[Item]:
    """The (rank, place) pairs of a window; a place alone stands for all ranks."""
    items: list[Item] = []
    places: list[int] = []
    for one in window:
        if isinstance(one, tuple):
            items.append(one)
        else:
            places.append(one)
    return items or [(rank, index) for rank in range(num_ranks) for index in places]


def compare(home: Home, came: Sequence[Any], expected: Sequence[Any]) -> None:
    """Raise unless these states equal those of the reference, up to the home's tolerance."""
    assert_equal_states([_in_float64(one) for one in came], expected, home.tolerance)


def _in_float64(state: Any) -> Any:
    if isinstance(state, dict):
        return {name: _in_float64(value) for name, value in state.items()}
    return state.cpu().double()


class Run:
    """A model on its engine with a decorated step, and its parameters after each update."""

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
        self.only_first_after = 3  # the last place in a window where both blocks are used

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
        """Run one micro-batch."""
        before = self.step.progress.updates
        self.step(self.home.model, self.optimizer, index)
        self.note(before)

    def note(self, before: int) -> None:
        """Keep the parameters if there was an update."""
        if self.step.progress.updates > before:
            self.states.append(self.home.full())

    def over(self, length: int, *, known: bool = True) -> None:
        """Run a loop over micro-batches 0, 1, ..."""
        before = 0
        for index in self.step.over(range(length) if known else iter(range(length))):
            before = self.step.progress.updates
            self.step(self.home.model, self.optimizer, index)
            self.note(before)
        if self.step.progress.updates > len(self.states):
            self.states.append(self.home.full())


def optimizer_of(home: Home) -> torch.optim.SGD:
    """SGD with weight decay, which moves a parameter that has a gradient, even of zeros."""
    return torch.optim.SGD(home.model.parameters(), lr=LR, weight_decay=DECAY, foreach=home.foreach)
