"""The rows of the table in test_table.py: ranks of unequal length, one scenario each."""

from __future__ import annotations

import torch

import gradsync
from gradsync import LossSum
from gradsync.engines import find
from tests.support.compare import assert_equal_states
from tests.support.homes import Home
from tests.support.reference import cut, mean_of
from tests.support.training import DECAY, LR, Run, data, reference

# How many items each rank has in one epoch after another, by the number of ranks: none, one and many.
EPOCHS = {
    1: [[5], [0], [1]],
    2: [[3, 7], [8, 2], [1, 5], [4, 4], [0, 2], [4, 0]],
    4: [[7, 7, 2, 2], [1, 5, 1, 5], [0, 4, 2, 0]],  # of HSDP: a replica is short, then a shard of each, then some ranks
}


def windows_of(epochs: list[list[int]]) -> list[list[tuple[int, int]]]:
    return [window for lengths in epochs for window in cut(lengths, 3)]


class Uneven(Run):
    """Parameters are noted in the updates, which ranks of unequal length have in common. A replay's loss is a NaN."""

    def __init__(self, home: Home, loss=None, **options) -> None:
        self._left = 0  # calls to come for this rank's own items
        weigh = loss or (lambda output, index: mean_of(output))

        def poisoned(output, index):
            self._left -= 1
            return weigh(output if self._left >= 0 else output * float("nan"), index)

        super().__init__(home, loss=poisoned, **options)
        self.optimizer.register_step_post_hook(lambda *_: self.states.append(home.full()))

    def epochs(self, epochs: list[list[int]], passed=(), sized: bool = True) -> None:
        for lengths in epochs:
            mine = [index for index in range(lengths[self.home.rank]) if (self.home.rank, index) not in passed]
            self._left = len(mine)
            items = range(lengths[self.home.rank])
            for index in self.step.over(items if sized else iter(items)):
                if index in mine:
                    self.step(self.home.model, self.optimizer, index)
            called = [sum((rank, i) not in passed for i in range(length)) for rank, length in enumerate(lengths)]
            if passed and sized:  # ranks that know their lengths ask nothing, and may run more than was needed
                assert -self._left >= self.replays_of(called)
            else:
                assert -self._left == self.replays_of(called)

    def replays_of(self, lengths: list[int]) -> int:
        """Where a forward communicates, all ranks run equally many."""
        communicates = any(engine.forward_communicates for engine in find([self.home.model]))
        return max(lengths) - lengths[self.home.rank] if communicates else 0


def uneven_over(home: Home) -> None:
    run = Uneven(home)
    run.epochs(EPOCHS[home.size])
    assert_equal_states(run.states, reference(home, windows_of(EPOCHS[home.size])))


def uneven_over_of_unknown_length(home: Home) -> None:
    epochs = EPOCHS[home.size][:2]
    run = Uneven(home)
    run.epochs(epochs, sized=False)
    assert_equal_states(run.states, reference(home, windows_of(epochs)))


def uneven_over_that_passes_over_items(home: Home) -> None:
    """In the middle of a window, and all that a rank had in its last."""
    epoch = [5, 8, 3, 7][: home.size]
    run, windows = Uneven(home), []
    for passed in ({(0, 0), (0, 4), (1, 2)}, {(0, 3), (0, 4), (1, 7), (1, 6)}):
        run.epochs([epoch], passed)
        called = [[index for index in range(length) if (rank, index) not in passed] for rank, length in enumerate(epoch)]
        windows += [[(rank, called[rank][i]) for rank, i in window] for window in windows_of([[*map(len, called)]])]
    assert_equal_states(run.states, reference(home, windows))


def uneven_loss_sum(home: Home) -> None:
    counts = lambda rank, index: (5 * rank + 3 * index) % 4  # noqa: E731
    epochs = EPOCHS[home.size][:2]
    run = Uneven(home, loss=lambda y, index: LossSum(y.square().sum() * counts(home.rank, index), counts(home.rank, index)))
    run.epochs(epochs)

    def weigh(model, items):
        return sum(model(data(*i)).square().sum() * counts(*i) for i in items) / sum(counts(*i) for i in items)

    assert_equal_states(run.states, reference(home, [one for one in windows_of(epochs) if any(counts(*i) for i in one)], weigh))


def uneven_amp(home: Home) -> None:
    epochs = EPOCHS[home.size][:2]
    run = Uneven(home, scaler=(home.scaler or torch.amp.GradScaler)("cpu", init_scale=4.0))
    run.epochs(epochs)
    assert_equal_states(run.states, reference(home, windows_of(epochs)))


def uneven_tail_drop(home: Home) -> None:
    epochs = EPOCHS[home.size][:2]
    run = Uneven(home, tail="drop")
    run.epochs(epochs)
    assert_equal_states(run.states, reference(home, [one for lengths in epochs for one in cut(lengths, 3)[: max(lengths) // 3]]))


def uneven_tail_carry(home: Home) -> None:
    run = Uneven(home, tail="carry")
    run.epochs([[4, 2, 1, 2][: home.size], [2, 1, 2, 0][: home.size]])
    before, after = [(0, 3)], [(0, 0), (0, 1), (1, 0), (2, 0), (2, 1)]
    windows = [cut([3, 2, 1, 2][: home.size], 3)[0], before + [one for one in after if one[0] < home.size]]
    assert_equal_states(run.states, reference(home, windows))


def uneven_skip(home: Home) -> None:
    bad = {(0, 1), (home.size - 1, 4)}
    run = Uneven(home, skip=KeyError)
    run.broken = {index for rank, index in bad if rank == home.rank}
    lengths = [8, 5, 2, 6][: home.size]
    for index in run.step.over(range(lengths[home.rank])):
        run._left = 1
        run.step(home.model, run.optimizer, index)
    assert_equal_states(run.states, reference(home, [[one for one in window if one not in bad] for window in cut(lengths, 3)]))


def uneven_skip_first(home: Home) -> None:
    """The very first micro-batch of one rank is dropped."""
    run = Uneven(home, skip=KeyError)
    run.broken = {0} if home.rank == home.size - 1 else set()
    for index in run.step.over(range(5)):
        run._left = 1
        run.step(home.model, run.optimizer, index)
    bad = (home.size - 1, 0)
    assert_equal_states(run.states, reference(home, [[one for one in window if one != bad] for window in cut([5] * home.size, 3)]))


def uneven_over_from_nothing(home: Home) -> None:
    """A rank that never had an item, at first: models and optimizers are named."""
    epochs = [[0, 4, 1, 2], [3, 1, 0, 0]]
    run = Uneven(home, named=True)
    run.epochs([lengths[: home.size] for lengths in epochs])
    assert_equal_states(run.states, reference(home, windows_of([lengths[: home.size] for lengths in epochs])))


def uneven_iterator(home: Home) -> None:
    _iterate_uneven(home, lambda micro, loss: micro.backward(loss), scaled=False)


def uneven_iterator_plain_backward(home: Home) -> None:
    _iterate_uneven(home, lambda micro, loss: loss.backward(), scaled=True)


def _iterate_uneven(home: Home, backward, scaled: bool) -> None:
    optimizer = torch.optim.SGD(home.model.parameters(), lr=LR, weight_decay=DECAY, foreach=home.foreach)
    epochs, states = [lengths for lengths in EPOCHS[home.size] if 0 not in lengths], []
    for lengths in epochs:
        for micro, index in gradsync.sync_every(home.model, 3, range(lengths[home.rank])):
            loss = mean_of(home.model(data(home.rank, index))) * (float("nan") if micro.replay else 1.0)
            backward(micro, loss / 3 if scaled else loss)
            if micro.last:
                optimizer.step()
                optimizer.zero_grad()
                states.append(home.full())

    def weigh(model, items):
        """A tail is as its user has scaled it."""
        return sum(mean_of(model(data(*i))) for i in items) / 3 / home.size

    assert_equal_states(states, reference(home, windows_of(epochs), weigh if scaled else None))


def uneven_iterator_from_nothing(home: Home) -> None:
    for micro, index in gradsync.sync_every(home.model, 3, range([0, 2, 2, 2][home.rank])):
        micro.backward(mean_of(home.model(data(home.rank, index))))


SCENARIOS = [
    uneven_over, uneven_over_of_unknown_length, uneven_over_that_passes_over_items, uneven_loss_sum, uneven_amp,
    uneven_tail_drop, uneven_tail_carry, uneven_skip, uneven_skip_first, uneven_over_from_nothing, uneven_iterator,
    uneven_iterator_plain_backward, uneven_iterator_from_nothing,
]  # fmt: skip
