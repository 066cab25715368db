"""The rows of the table in test_table.py: one scenario each, run on every rank, against float64 on one process."""

from __future__ import annotations

import torch

import gradsync
from gradsync import LossSum
from tests.support.compare import assert_equal_states
from tests.support.homes import Home
from tests.support.models import Block
from tests.support.reference import mean_of
from tests.support.training import DECAY, LR, Run, data, reference


def full_windows(home: Home) -> None:
    run = Run(home)
    for index in range(6):
        run(index)
    assert_equal_states(run.states, reference(home, [range(3), range(3, 6)]))


def tail_over(home: Home) -> None:
    run = Run(home)
    run.over(5)
    assert_equal_states(run.states, reference(home, [range(3), range(3, 5)]))


def tail_flush(home: Home) -> None:
    run = Run(home)
    for index in range(5):
        run(index)
    run.step.flush()
    run.note(1)
    assert_equal_states(run.states, reference(home, [range(3), range(3, 5)]))


def tail_drop(home: Home) -> None:
    run = Run(home, tail="drop")
    run.over(5)
    run.over(3)
    assert_equal_states(run.states, reference(home, [range(3), range(3)]))


def tail_carry(home: Home) -> None:
    run = Run(home, tail="carry")
    run.over(4)
    run.over(2)
    assert_equal_states(run.states, reference(home, [range(3), [3, 0, 1]]))


def loss_sum(home: Home) -> None:
    counts = lambda rank, index: 1 + (5 * rank + 3 * index) % 4  # noqa: E731
    run = Run(home, loss=lambda y, index: LossSum(y.square().sum() * counts(home.rank, index), counts(home.rank, index)))
    run.over(5)

    def weigh(model, items):
        return sum(model(data(*i)).square().sum() * counts(*i) for i in items) / sum(counts(*i) for i in items)

    assert_equal_states(run.states, reference(home, [range(3), range(3, 5)], weigh))


def clipping(home: Home) -> None:
    run = Run(home, clip_norm=0.05)
    for index in range(6):
        run(index)
        if index % 3 == 2:
            run.states.insert(-1, run.step.progress.grad_norm)
    assert_equal_states(run.states, reference(home, [range(3), range(3, 6)], clip=0.05))


def amp_with_an_inf_on_one_rank(home: Home) -> None:
    scaler = (home.scaler or torch.amp.GradScaler)("cpu", init_scale=4.0)
    run = Run(home, scaler=scaler)
    run.poisoned = 1
    for index in range(6):
        run(index)
    assert (run.step.progress.updates, run.step.progress.skipped) == (1, 1)
    assert scaler.get_scale() == 2.0
    assert_equal_states(run.states, reference(home, [range(3, 6)]))


def nonfinite_on_one_rank(home: Home) -> None:
    run = Run(home, nonfinite="skip")
    run.poisoned = 1
    for index in range(6):
        run(index)
    assert (run.step.progress.updates, run.step.progress.skipped) == (1, 1)
    assert_equal_states(run.states, reference(home, [range(3, 6)]))


def reset(home: Home) -> None:
    run = Run(home)
    for index in (0, 1):
        run(index)
    run.step.reset()
    for index in (3, 4, 5):
        run(index)
    assert_equal_states(run.states, reference(home, [range(3, 6)]))


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
    assert_equal_states(run.states, reference(home, [range(3, 6)]))


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
    assert_equal_states(run.states, reference(home, [range(3, 6)]))


def iterator(home: Home) -> None:
    _iterate(home, lambda micro, loss: micro.backward(loss), scaled=False)


def iterator_plain_backward(home: Home) -> None:
    _iterate(home, lambda micro, loss: loss.backward(), scaled=True)


def _iterate(home: Home, backward, scaled: bool) -> None:
    optimizer = torch.optim.SGD(home.model.parameters(), lr=LR, weight_decay=DECAY, foreach=home.foreach)
    states = []
    for micro, index in gradsync.sync_every(home.model, 3, range(6)):
        loss = mean_of(home.model(data(home.rank, index)))
        backward(micro, loss / 3 if scaled else loss)
        if micro.last:
            optimizer.step()
            optimizer.zero_grad()
            states.append(home.full())
    assert_equal_states(states, reference(home, [range(3), range(3, 6)]))


def no_sync_then_sync_gradients(home: Home) -> None:
    optimizer = torch.optim.SGD(home.model.parameters(), lr=LR, weight_decay=DECAY, foreach=home.foreach)
    held = gradsync.no_sync(home.model)
    states = []
    for start in (0, 3):
        for index in range(start, start + 3):
            with held:
                (mean_of(home.model(data(home.rank, index))) / 3).backward()
        gradsync.sync_gradients(home.model)
        optimizer.step()
        optimizer.zero_grad()
        states.append(home.full())
    assert_equal_states(states, reference(home, [range(3), range(3, 6)]))


def no_sync_then_backward(home: Home) -> None:
    """The engine's own synchronisation, after `no_sync` has been left."""
    optimizer = torch.optim.SGD(home.model.parameters(), lr=LR, weight_decay=DECAY, foreach=home.foreach)
    states = []
    for start in (0, 3):
        for index in range(start, start + 3):
            with gradsync.no_sync(home.model, enabled=index % 3 < 2), gradsync.no_sync(home.model, enabled=index % 3 < 1):
                (mean_of(home.model(data(home.rank, index))) / 3).backward()
        optimizer.step()
        optimizer.zero_grad()
        states.append(home.full())
    assert_equal_states(states, reference(home, [range(3), range(3, 6)]))


def a_parameter_that_nobody_used(home: Home) -> None:
    """Its gradient stays None, so that weight decay does not move it."""
    run = Run(home)
    run.over(5)
    assert_equal_states(run.states, reference(home, [range(3), range(3, 5)]))


def a_parameter_used_only_early(home: Home) -> None:
    """In held micro-batches, and not on the boundary."""
    run = Run(home)
    run.only_first_after = 1
    for index in range(6):
        run(index)

    def weigh(model, items):
        return sum(mean_of(model(data(*i), only_first=i[1] % 3 > 1)) for i in items) / len(items)

    assert_equal_states(run.states, reference(home, [range(3), range(3, 6)], weigh))


SCENARIOS = [
    full_windows, tail_over, tail_flush, tail_drop, tail_carry, loss_sum, clipping, amp_with_an_inf_on_one_rank,
    nonfinite_on_one_rank, reset, exception_in_the_body, exception_in_the_boundary_backward,
    exception_in_a_held_backward, exception_in_the_forward, iterator, iterator_plain_backward,
    no_sync_then_sync_gradients, no_sync_then_backward, a_parameter_that_nobody_used, a_parameter_used_only_early,
]  # fmt: skip
