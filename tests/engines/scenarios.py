"""The rows of test_engines_table.py: one scenario each, run on every rank, against float64 on one process."""

from __future__ import annotations

import pytest
import torch

import gradsync
from gradsync import LossSum
from gradsync.engines import find
from tests.support.homes import Block, Home, home_of, net
from tests.support.reference import cut

LR, DECAY = 0.1, 0.01


def data(rank: int, index: int, rows: int = 3) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * rank + index)
    return torch.randn(rows, 4, generator=generator, dtype=torch.float64)


def mean_loss(output):
    return output.square().mean() + 0.1 * output.sum()


def reference(home: Home, windows, weigh=None, clip=None) -> list[dict[str, torch.Tensor]]:
    """The parameters after each update, where each window is one big batch.

    A window is what each rank has in it, or who has what: places, or (rank, place).
    """
    model = net(unused=any("unused" in name for name in home.full()))
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, weight_decay=DECAY)
    states = []
    for window in windows:
        items = [one for one in window if isinstance(one, tuple)]
        items = items or [(rank, index) for rank in range(home.size) for index in window]
        loss = weigh(model, items) if weigh else sum(mean_loss(model(data(*item))) for item in items) / len(items)
        loss.backward()
        if clip:
            states.append(torch.nn.utils.clip_grad_norm_(model.parameters(), clip))
        optimizer.step()
        optimizer.zero_grad()
        states.append({name: p.detach().clone() for name, p in model.named_parameters()})
    return states


def same(came: list, expected: list, tolerance: float = 1e-10) -> None:
    assert len(came) == len(expected), f"{len(came)} updates instead of {len(expected)}"
    for number, (a, b) in enumerate(zip(came, expected)):
        if not isinstance(b, dict):
            torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)
            continue
        assert a.keys() == b.keys(), (sorted(a), sorted(b))
        for name, value in b.items():
            torch.testing.assert_close(
                a[name], value, rtol=tolerance, atol=tolerance, msg=lambda m: f"update {number}, {name}: {m}"
            )


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
            return loss(output, index) if loss else mean_loss(output)

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


# -- scenarios -----------------------------------------------------------------------------------------------------


def full_windows(home: Home) -> None:
    run = Run(home)
    for index in range(6):
        run(index)
    same(run.states, reference(home, [range(3), range(3, 6)]))


def tail_over(home: Home) -> None:
    run = Run(home)
    run.over(5)
    same(run.states, reference(home, [range(3), range(3, 5)]))


def tail_flush(home: Home) -> None:
    run = Run(home)
    for index in range(5):
        run(index)
    run.step.flush()
    run.note(1)
    same(run.states, reference(home, [range(3), range(3, 5)]))


def tail_drop(home: Home) -> None:
    run = Run(home, tail="drop")
    run.over(5)
    run.over(3)
    same(run.states, reference(home, [range(3), range(3)]))


def tail_carry(home: Home) -> None:
    run = Run(home, tail="carry")
    run.over(4)
    run.over(2)
    same(run.states, reference(home, [range(3), [3, 0, 1]]))


def loss_sum(home: Home) -> None:
    counts = lambda rank, index: 1 + (5 * rank + 3 * index) % 4  # noqa: E731
    run = Run(home, loss=lambda y, index: LossSum(y.square().sum() * counts(home.rank, index), counts(home.rank, index)))
    run.over(5)

    def weigh(model, items):
        return sum(model(data(*i)).square().sum() * counts(*i) for i in items) / sum(counts(*i) for i in items)

    same(run.states, reference(home, [range(3), range(3, 5)], weigh))


def clipping(home: Home) -> None:
    run = Run(home, clip_norm=0.05)
    for index in range(6):
        run(index)
        if index % 3 == 2:
            run.states.insert(-1, run.step.progress.grad_norm)
    same(run.states, reference(home, [range(3), range(3, 6)], clip=0.05))


def amp_with_an_inf_on_one_rank(home: Home) -> None:
    scaler = (home.scaler or torch.amp.GradScaler)("cpu", init_scale=4.0)
    run = Run(home, scaler=scaler)
    run.poisoned = 1
    for index in range(6):
        run(index)
    assert (run.step.progress.updates, run.step.progress.skipped) == (1, 1)
    assert scaler.get_scale() == 2.0
    same(run.states, reference(home, [range(3, 6)]))


def nonfinite_on_one_rank(home: Home) -> None:
    run = Run(home, nonfinite="skip")
    run.poisoned = 1
    for index in range(6):
        run(index)
    assert (run.step.progress.updates, run.step.progress.skipped) == (1, 1)
    same(run.states, reference(home, [range(3, 6)]))


def reset(home: Home) -> None:
    run = Run(home)
    for index in (0, 1):
        run(index)
    run.step.reset()
    for index in (3, 4, 5):
        run(index)
    same(run.states, reference(home, [range(3, 6)]))


def exception_in_the_body(home: Home) -> None:
    run = Run(home)
    run.explode = 2
    for index in range(3):
        try:
            run(index)
        except KeyError:
            assert index == 2
    for index in (3, 4, 5):
        run(index)
    same(run.states, reference(home, [range(3, 6)]))


def exception_in_the_boundary_backward(home: Home) -> None:
    """When some gradients have arrived, and others not."""
    _fail(home, "backward", 2)


def exception_in_a_held_backward(home: Home) -> None:
    _fail(home, "backward", 1)


def exception_in_the_forward(home: Home) -> None:
    """Of the second block, when the first has run."""
    _fail(home, "forward", 2)


def _fail(home: Home, where: str, at: int) -> None:
    run = Run(home)
    second = [module for module in home.model.modules() if isinstance(module, Block)][1]
    for index in range(at + 1):
        second.fails = where if index == at else ""
        try:
            run(index)
        except ArithmeticError:
            assert index == at
        else:
            assert index < at
    second.fails = ""
    for index in (3, 4, 5):
        run(index)
    same(run.states, reference(home, [range(3, 6)]))


def iterator(home: Home) -> None:
    _iterate(home, lambda micro, loss: micro.backward(loss), scaled=False)


def iterator_plain_backward(home: Home) -> None:
    _iterate(home, lambda micro, loss: loss.backward(), scaled=True)


def _iterate(home: Home, backward, scaled: bool) -> None:
    optimizer = torch.optim.SGD(home.model.parameters(), lr=LR, weight_decay=DECAY, foreach=home.foreach)
    states = []
    for micro, index in gradsync.sync_every(home.model, 3, range(6)):
        loss = mean_loss(home.model(data(home.rank, index)))
        backward(micro, loss / 3 if scaled else loss)
        if micro.last:
            optimizer.step()
            optimizer.zero_grad()
            states.append(home.full())
    same(states, reference(home, [range(3), range(3, 6)]))


def no_sync_then_sync_gradients(home: Home) -> None:
    optimizer = torch.optim.SGD(home.model.parameters(), lr=LR, weight_decay=DECAY, foreach=home.foreach)
    held = gradsync.no_sync(home.model)
    states = []
    for start in (0, 3):
        for index in range(start, start + 3):
            with held:
                (mean_loss(home.model(data(home.rank, index))) / 3).backward()
        gradsync.sync_gradients(home.model)
        optimizer.step()
        optimizer.zero_grad()
        states.append(home.full())
    same(states, reference(home, [range(3), range(3, 6)]))


def no_sync_then_backward(home: Home) -> None:
    """The engine's own synchronisation, after `no_sync` has been left."""
    optimizer = torch.optim.SGD(home.model.parameters(), lr=LR, weight_decay=DECAY, foreach=home.foreach)
    states = []
    for start in (0, 3):
        for index in range(start, start + 3):
            with gradsync.no_sync(home.model, enabled=index % 3 < 2), gradsync.no_sync(home.model, enabled=index % 3 < 1):
                (mean_loss(home.model(data(home.rank, index))) / 3).backward()
        optimizer.step()
        optimizer.zero_grad()
        states.append(home.full())
    same(states, reference(home, [range(3), range(3, 6)]))


def a_parameter_that_nobody_used(home: Home) -> None:
    """Its gradient stays None, so that weight decay does not move it."""
    run = Run(home)
    run.over(5)
    same(run.states, reference(home, [range(3), range(3, 5)]))


def a_parameter_used_only_early(home: Home) -> None:
    """In held micro-batches, and not on the boundary."""
    run = Run(home)
    run.only_first_after = 1
    for index in range(6):
        run(index)

    def weigh(model, items):
        return sum(mean_loss(model(data(*i), only_first=i[1] % 3 > 1)) for i in items) / len(items)

    same(run.states, reference(home, [range(3), range(3, 6)], weigh))


# -- ranks of unequal length ---------------------------------------------------------------------------------------


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
        weigh = loss or (lambda output, index: mean_loss(output))

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
            assert -self._left == self.replays_of(lengths) or passed

    def replays_of(self, lengths: list[int]) -> int:
        """Where a forward communicates, all ranks run equally many."""
        communicates = any(engine.forward_communicates for engine in find([self.home.model]))
        return max(lengths) - lengths[self.home.rank] if communicates else 0


def uneven_over(home: Home) -> None:
    run = Uneven(home)
    run.epochs(EPOCHS[home.size])
    same(run.states, reference(home, windows_of(EPOCHS[home.size])))


def uneven_over_of_unknown_length(home: Home) -> None:
    epochs = EPOCHS[home.size][:2]
    run = Uneven(home)
    run.epochs(epochs, sized=False)
    same(run.states, reference(home, windows_of(epochs)))


def uneven_over_that_passes_over_items(home: Home) -> None:
    """In the middle of a window, and all that a rank had in its last."""
    epoch = [5, 8, 3, 7][: home.size]
    run, windows = Uneven(home), []
    for passed in ({(0, 0), (0, 4), (1, 2)}, {(0, 3), (0, 4), (1, 7), (1, 6)}):
        run.epochs([epoch], passed)
        called = [[index for index in range(length) if (rank, index) not in passed] for rank, length in enumerate(epoch)]
        windows += [[(rank, called[rank][i]) for rank, i in window] for window in windows_of([[*map(len, called)]])]
    same(run.states, reference(home, windows))


def uneven_loss_sum(home: Home) -> None:
    counts = lambda rank, index: (5 * rank + 3 * index) % 4  # noqa: E731
    epochs = EPOCHS[home.size][:2]
    run = Uneven(home, loss=lambda y, index: LossSum(y.square().sum() * counts(home.rank, index), counts(home.rank, index)))
    run.epochs(epochs)

    def weigh(model, items):
        return sum(model(data(*i)).square().sum() * counts(*i) for i in items) / sum(counts(*i) for i in items)

    same(run.states, reference(home, [one for one in windows_of(epochs) if any(counts(*i) for i in one)], weigh))


def uneven_amp(home: Home) -> None:
    epochs = EPOCHS[home.size][:2]
    run = Uneven(home, scaler=(home.scaler or torch.amp.GradScaler)("cpu", init_scale=4.0))
    run.epochs(epochs)
    same(run.states, reference(home, windows_of(epochs)))


def uneven_tail_drop(home: Home) -> None:
    epochs = EPOCHS[home.size][:2]
    run = Uneven(home, tail="drop")
    run.epochs(epochs)
    same(run.states, reference(home, [one for lengths in epochs for one in cut(lengths, 3)[: max(lengths) // 3]]))


def uneven_tail_carry(home: Home) -> None:
    run = Uneven(home, tail="carry")
    run.epochs([[4, 2, 1, 2][: home.size], [2, 1, 2, 0][: home.size]])
    before, after = [(0, 3)], [(0, 0), (0, 1), (1, 0), (2, 0), (2, 1)]
    windows = [cut([3, 2, 1, 2][: home.size], 3)[0], before + [one for one in after if one[0] < home.size]]
    same(run.states, reference(home, windows))


def uneven_skip(home: Home) -> None:
    bad = {(0, 1), (home.size - 1, 4)}
    run = Uneven(home, skip=KeyError)
    run.broken = {index for rank, index in bad if rank == home.rank}
    lengths = [8, 5, 2, 6][: home.size]
    for index in run.step.over(range(lengths[home.rank])):
        run._left = 1
        run.step(home.model, run.optimizer, index)
    same(run.states, reference(home, [[one for one in window if one not in bad] for window in cut(lengths, 3)]))


def uneven_skip_first(home: Home) -> None:
    """The very first micro-batch of one rank is dropped."""
    run = Uneven(home, skip=KeyError)
    run.broken = {0} if home.rank == home.size - 1 else set()
    for index in run.step.over(range(5)):
        run._left = 1
        run.step(home.model, run.optimizer, index)
    bad = (home.size - 1, 0)
    same(run.states, reference(home, [[one for one in window if one != bad] for window in cut([5] * home.size, 3)]))


def uneven_over_from_nothing(home: Home) -> None:
    """A rank that never had an item, at first: models and optimizers are named."""
    epochs = [[0, 4, 1, 2], [3, 1, 0, 0]]
    run = Uneven(home, named=True)
    run.epochs([lengths[: home.size] for lengths in epochs])
    same(run.states, reference(home, windows_of([lengths[: home.size] for lengths in epochs])))


def uneven_iterator(home: Home) -> None:
    _iterate_uneven(home, lambda micro, loss: micro.backward(loss), scaled=False)


def uneven_iterator_plain_backward(home: Home) -> None:
    _iterate_uneven(home, lambda micro, loss: loss.backward(), scaled=True)


def _iterate_uneven(home: Home, backward, scaled: bool) -> None:
    optimizer = torch.optim.SGD(home.model.parameters(), lr=LR, weight_decay=DECAY, foreach=home.foreach)
    epochs, states = [lengths for lengths in EPOCHS[home.size] if 0 not in lengths], []
    for lengths in epochs:
        for micro, index in gradsync.sync_every(home.model, 3, range(lengths[home.rank])):
            loss = mean_loss(home.model(data(home.rank, index))) * (float("nan") if micro.replay else 1.0)
            backward(micro, loss / 3 if scaled else loss)
            if micro.last:
                optimizer.step()
                optimizer.zero_grad()
                states.append(home.full())

    def weigh(model, items):
        """A tail is as its user has scaled it."""
        return sum(mean_loss(model(data(*i))) for i in items) / 3 / home.size

    same(states, reference(home, windows_of(epochs), weigh if scaled else None))


def uneven_iterator_from_nothing(home: Home) -> None:
    for micro, index in gradsync.sync_every(home.model, 3, range([0, 2, 2, 2][home.rank])):
        micro.backward(mean_loss(home.model(data(home.rank, index))))


SCENARIOS = {
    one.__name__: one
    for one in (
        full_windows, tail_over, tail_flush, tail_drop, tail_carry, loss_sum, clipping, amp_with_an_inf_on_one_rank,
        nonfinite_on_one_rank, reset, exception_in_the_body, exception_in_the_boundary_backward,
        exception_in_a_held_backward, exception_in_the_forward, iterator,
        a_parameter_that_nobody_used, a_parameter_used_only_early, iterator_plain_backward, no_sync_then_sync_gradients, no_sync_then_backward,
        uneven_over, uneven_over_of_unknown_length, uneven_over_that_passes_over_items, uneven_loss_sum, uneven_amp,
        uneven_tail_drop, uneven_tail_carry, uneven_skip, uneven_skip_first, uneven_over_from_nothing, uneven_iterator,
        uneven_iterator_plain_backward, uneven_iterator_from_nothing,
    )
}  # fmt: skip


def cell(engine: str, scenario: str, error: str | None) -> None:
    """One cell of the table."""
    home = home_of(engine, unused=scenario == "a_parameter_that_nobody_used")
    if error is None:
        SCENARIOS[scenario](home)
    else:
        with pytest.raises((gradsync.GradSyncError, RuntimeError), match=error):
            SCENARIOS[scenario](home)
