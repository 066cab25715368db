"""Promises for ranks of unequal length. Each function is a row of the table."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

import gradsync
from gradsync import LossSum
from gradsync.engines import find
from gradsync.verify.compare import need
from gradsync.verify.reference import cut, mean_of
from gradsync.verify.training import Run, compare, data, data_of, optimizer_of, reference

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from gradsync.verify.homes import Home
    from gradsync.verify.reference import Item

# By the number of ranks: how many items each rank has in each epoch. There are none, one and many.
EPOCHS = {
    1: [[5], [0], [1]],
    2: [[3, 7], [8, 2], [1, 5], [4, 4], [0, 2], [4, 0]],
    4: [[7, 7, 2, 2], [1, 5, 1, 5], [0, 4, 2, 0]],  # HSDP: a replica is short, then a shard of each, then some ranks
}


def epochs_of(size: int) -> list[list[int]]:
    """The lengths for this number of ranks, by epoch."""
    return EPOCHS.get(size) or [spread(lengths, size) for lengths in EPOCHS[4]]


def spread(lengths: Sequence[int], size: int) -> list[int]:
    """A length for each rank; these lengths are repeated."""
    return [lengths[rank % len(lengths)] for rank in range(size)]


def windows_of(epochs: list[list[int]]) -> list[list[Item]]:
    """The (rank, place) pairs of each window."""
    return [window for lengths in epochs for window in cut(lengths, 3)]


class Uneven(Run):
    """Keeps parameters in each update, because ranks of unequal length share these only. A replay's loss is a NaN."""

    def __init__(self, home: Home, loss: Callable[[torch.Tensor, int], Any] | None = None, **options: Any) -> None:
        self.left = 0  # calls that remain for this rank's own items
        weigh = loss or (lambda output, _: mean_of(output))

        def poisoned(output: torch.Tensor, index: int) -> Any:
            self.left -= 1
            return weigh(output if self.left >= 0 else output * float("nan"), index)

        super().__init__(home, loss=poisoned, **options)
        self.optimizer.register_step_post_hook(lambda *_: self.states.append(home.full()))

    def epochs(self, epochs: list[list[int]], passed: Collection[Item] = (), *, sized: bool = True) -> None:
        """Run loops of these lengths, without a call for the items in `passed`."""
        for lengths in epochs:
            mine = [index for index in range(lengths[self.home.rank]) if (self.home.rank, index) not in passed]
            self.left = len(mine)
            items = range(lengths[self.home.rank])
            for index in self.step.over(items if sized else iter(items)):
                if index in mine:
                    self.step(self.home.model, self.optimizer, index)
            called = [sum((rank, i) not in passed for i in range(length)) for rank, length in enumerate(lengths)]
            wanted = self.replays_of(called)
            # Ranks that know their lengths do not ask each other, so items without a call may cause more replays.
            enough = -self.left >= wanted if passed and sized else -self.left == wanted
            need(enough, f"the last call was repeated {-self.left} times, not {wanted}")

    def replays_of(self, lengths: list[int]) -> int:
        """How often this rank repeats its last call: if forwards communicate, all ranks run equally many."""
        communicates = any(engine.forward_communicates for engine in find([self.home.model]))
        return max(lengths) - lengths[self.home.rank] if communicates else 0


def uneven_over(home: Home) -> None:
    run = Uneven(home)
    run.epochs(epochs_of(home.size))
    compare(home, run.states, reference(home, windows_of(epochs_of(home.size))))


def uneven_over_of_unknown_length(home: Home) -> None:
    epochs = epochs_of(home.size)[:2]
    run = Uneven(home)
    run.epochs(epochs, sized=False)
    compare(home, run.states, reference(home, windows_of(epochs)))


def uneven_over_that_passes_over_items(home: Home) -> None:
    """Items in the middle of a window, and all items that a rank has in its last window."""
    epoch = spread([5, 8, 3, 7], home.size)
    run = Uneven(home)
    windows: list[list[Item]] = []
    for passed in ({(0, 0), (0, 4), (1, 2)}, {(0, 3), (0, 4), (1, 7), (1, 6)}):
        run.epochs([epoch], passed)
        called = [
            [index for index in range(length) if (rank, index) not in passed] for rank, length in enumerate(epoch)
        ]
        windows += [[(rank, called[rank][i]) for rank, i in window] for window in windows_of([[*map(len, called)]])]
    compare(home, run.states, reference(home, windows))


def uneven_loss_sum(home: Home) -> None:
    def count(rank: int, index: int) -> int:
        return (5 * rank + 3 * index) % 4

    epochs = epochs_of(home.size)[:2]
    run = Uneven(home, lambda y, index: LossSum(y.square().sum() * count(home.rank, index), count(home.rank, index)))
    run.epochs(epochs)

    def weigh(model: Any, items: list[Item]) -> torch.Tensor:
        losses = [model(data(*item)).square().sum() * count(*item) for item in items]
        return torch.stack(losses).sum() / sum(count(*item) for item in items)

    weighty = [window for window in windows_of(epochs) if any(count(*item) for item in window)]
    compare(home, run.states, reference(home, weighty, weigh))


def uneven_amp(home: Home) -> None:
    epochs = epochs_of(home.size)[:2]
    run = Uneven(home, scaler=home.make_scaler())
    run.epochs(epochs)
    compare(home, run.states, reference(home, windows_of(epochs)))


def uneven_tail_drop(home: Home) -> None:
    epochs = epochs_of(home.size)[:2]
    run = Uneven(home, tail="drop")
    run.epochs(epochs)
    full = [window for lengths in epochs for window in cut(lengths, 3)[: max(lengths) // 3]]
    compare(home, run.states, reference(home, full))


def uneven_tail_carry(home: Home) -> None:
    run = Uneven(home, tail="carry")
    first, second = spread([4, 2, 1, 2], home.size), spread([2, 1, 2, 0], home.size)
    run.epochs([first, second])
    full, carried = cut(first, 3)
    windows = [full, carried + [(rank, index) for rank, length in enumerate(second) for index in range(length)]]
    compare(home, run.states, reference(home, windows))


def uneven_skip(home: Home) -> None:
    bad = {(0, 1), (home.size - 1, 4)}
    run = Uneven(home, skip=KeyError)
    run.broken = {index for rank, index in bad if rank == home.rank}
    lengths = spread([8, 5, 2, 6], home.size)
    for index in run.step.over(range(lengths[home.rank])):
        run.left = 1
        run.step(home.model, run.optimizer, index)
    good = [[item for item in window if item not in bad] for window in cut(lengths, 3)]
    compare(home, run.states, reference(home, good))


def uneven_skip_first(home: Home) -> None:
    """One rank drops its very first micro-batch."""
    run = Uneven(home, skip=KeyError)
    run.broken = {0} if home.rank == home.size - 1 else set()
    for index in run.step.over(range(5)):
        run.left = 1
        run.step(home.model, run.optimizer, index)
    bad = (home.size - 1, 0)
    good = [[item for item in window if item != bad] for window in cut([5] * home.size, 3)]
    compare(home, run.states, reference(home, good))


def uneven_over_from_nothing(home: Home) -> None:
    """A rank has no item at first; models and optimizers are named, so that it can take part."""
    epochs = [[0, 4, 1, 2], [3, 1, 0, 0]]
    run = Uneven(home, named=True)
    run.epochs([spread(lengths, home.size) for lengths in epochs])
    compare(home, run.states, reference(home, windows_of([spread(lengths, home.size) for lengths in epochs])))


def uneven_iterator(home: Home) -> None:
    _iterate_uneven(home, lambda micro, loss: micro.backward(loss), scaled=False)


def uneven_iterator_plain_backward(home: Home) -> None:
    _iterate_uneven(home, lambda _, loss: loss.backward(), scaled=True)


def _iterate_uneven(home: Home, backward: Callable[[Any, torch.Tensor], object], *, scaled: bool) -> None:
    optimizer = optimizer_of(home)
    epochs = [lengths for lengths in epochs_of(home.size) if 0 not in lengths]
    states: list[Any] = []
    for lengths in epochs:
        for micro, index in gradsync.sync_every(home.model, 3, range(lengths[home.rank])):
            loss = mean_of(home.model(data_of(home, index))) * (float("nan") if micro.replay else 1.0)
            backward(micro, loss / 3 if scaled else loss)
            if micro.last:
                optimizer.step()
                optimizer.zero_grad()
                states.append(home.full())

    def weigh(model: Any, items: list[Item]) -> torch.Tensor:
        """A tail is divided by 3, too, because its user has done so."""
        return torch.stack([mean_of(model(data(*item))) for item in items]).sum() / 3 / home.size

    compare(home, states, reference(home, windows_of(epochs), weigh if scaled else None))


def uneven_iterator_from_nothing(home: Home) -> None:
    for micro, index in gradsync.sync_every(home.model, 3, range(2 if home.rank else 0)):
        micro.backward(mean_of(home.model(data_of(home, index))))
