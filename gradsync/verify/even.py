"""Promises for ranks of equal length. Each function is a row of the table, and runs on every rank."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

import gradsync
from gradsync import LossSum
from gradsync.verify.compare import need
from gradsync.verify.models import second_block
from gradsync.verify.reference import mean_of
from gradsync.verify.training import Run, compare, data, data_of, optimizer_of, reference

if TYPE_CHECKING:
    from collections.abc import Callable

    from gradsync.verify.homes import Home
    from gradsync.verify.reference import Item


def full_windows(home: Home) -> None:
    run = Run(home)
    for index in range(6):
        run(index)
    compare(home, run.states, reference(home, [range(3), range(3, 6)]))


def tail_over(home: Home) -> None:
    run = Run(home)
    run.over(5)
    compare(home, run.states, reference(home, [range(3), range(3, 5)]))


def tail_flush(home: Home) -> None:
    run = Run(home)
    for index in range(5):
        run(index)
    run.step.flush()
    run.note(1)
    compare(home, run.states, reference(home, [range(3), range(3, 5)]))


def tail_drop(home: Home) -> None:
    run = Run(home, tail="drop")
    run.over(5)
    run.over(3)
    compare(home, run.states, reference(home, [range(3), range(3)]))


def tail_carry(home: Home) -> None:
    run = Run(home, tail="carry")
    run.over(4)
    run.over(2)
    compare(home, run.states, reference(home, [range(3), [3, 0, 1]]))


def loss_sum(home: Home) -> None:
    def count(rank: int, index: int) -> int:
        return 1 + (5 * rank + 3 * index) % 4

    run = Run(home, loss=lambda y, index: LossSum(y.square().sum() * count(home.rank, index), count(home.rank, index)))
    run.over(5)

    def weigh(model: Any, items: list[Item]) -> torch.Tensor:
        losses = [model(data(*item)).square().sum() * count(*item) for item in items]
        return torch.stack(losses).sum() / sum(count(*item) for item in items)

    compare(home, run.states, reference(home, [range(3), range(3, 5)], weigh))


def clipping(home: Home) -> None:
    run = Run(home, clip_norm=0.05)
    for index in range(6):
        run(index)
        if index % 3 == 2:
            run.states.insert(-1, run.step.progress.grad_norm)
    compare(home, run.states, reference(home, [range(3), range(3, 6)], clip=0.05))


def amp_with_an_inf_on_one_rank(home: Home) -> None:
    scaler = home.make_scaler()
    run = Run(home, scaler=scaler)
    run.poisoned = 1
    for index in range(6):
        run(index)
    _need_one_skipped(run)
    need(scaler.get_scale() == 2.0, f"the scale is {scaler.get_scale()}, not halved to 2.0")
    compare(home, run.states, reference(home, [range(3, 6)]))


def nonfinite_on_one_rank(home: Home) -> None:
    run = Run(home, nonfinite="skip")
    run.poisoned = 1
    for index in range(6):
        run(index)
    _need_one_skipped(run)
    compare(home, run.states, reference(home, [range(3, 6)]))


def _need_one_skipped(run: Run) -> None:
    now = run.step.progress
    need((now.updates, now.skipped) == (1, 1), f"{now.updates} updates and {now.skipped} skipped, not 1 of each")


def reset(home: Home) -> None:
    run = Run(home)
    for index in (0, 1):
        run(index)
    run.step.reset()
    for index in (3, 4, 5):
        run(index)
    compare(home, run.states, reference(home, [range(3, 6)]))


def exception_in_the_body(home: Home) -> None:
    run = Run(home)
    run.explode = 2
    for index in range(3):
        try:
            run(index)
        except KeyError:
            need(index == 2, "the error came early")
    for index in (3, 4, 5):
        run(index)
    compare(home, run.states, reference(home, [range(3, 6)]))


def exception_in_the_boundary_backward(home: Home) -> None:
    """Some gradients have arrived, and others have not."""
    _fail(home, "backward", 2)


def exception_in_a_held_backward(home: Home) -> None:
    _fail(home, "backward", 1)


def exception_in_the_forward(home: Home) -> None:
    """The second block fails, when the first has run."""
    _fail(home, "forward", 2)


def _fail(home: Home, where: str, at: int) -> None:
    run = Run(home)
    second = second_block(home.model)
    for index in range(at + 1):
        second.fails = where if index == at else ""
        try:
            run(index)
        except ArithmeticError:
            need(index == at, "the error came early")
        else:
            need(index < at, "the error was swallowed")
    second.fails = ""
    for index in (3, 4, 5):
        run(index)
    compare(home, run.states, reference(home, [range(3, 6)]))


def iterator(home: Home) -> None:
    _iterate(home, lambda micro, loss: micro.backward(loss), scaled=False)


def iterator_plain_backward(home: Home) -> None:
    _iterate(home, lambda _, loss: loss.backward(), scaled=True)


def _iterate(home: Home, backward: Callable[[Any, torch.Tensor], object], *, scaled: bool) -> None:
    optimizer = optimizer_of(home)
    states: list[Any] = []
    for micro, index in gradsync.sync_every(home.model, 3, range(6)):
        loss = mean_of(home.model(data_of(home, index)))
        backward(micro, loss / 3 if scaled else loss)
        if micro.last:
            optimizer.step()
            optimizer.zero_grad()
            states.append(home.full())
    compare(home, states, reference(home, [range(3), range(3, 6)]))


def no_sync_then_sync_gradients(home: Home) -> None:
    optimizer = optimizer_of(home)
    held = gradsync.no_sync(home.model)
    states: list[Any] = []
    for start in (0, 3):
        for index in range(start, start + 3):
            with held:
                (mean_of(home.model(data_of(home, index))) / 3).backward()
        gradsync.sync_gradients(home.model)
        optimizer.step()
        optimizer.zero_grad()
        states.append(home.full())
    compare(home, states, reference(home, [range(3), range(3, 6)]))


def no_sync_then_backward(home: Home) -> None:
    """The engine's own synchronisation, after `no_sync` has been left."""
    optimizer = optimizer_of(home)
    states: list[Any] = []
    for start in (0, 3):
        for index in range(start, start + 3):
            with (
                gradsync.no_sync(home.model, enabled=index % 3 < 2),
                gradsync.no_sync(home.model, enabled=index % 3 < 1),
            ):
                (mean_of(home.model(data_of(home, index))) / 3).backward()
        optimizer.step()
        optimizer.zero_grad()
        states.append(home.full())
    compare(home, states, reference(home, [range(3), range(3, 6)]))


def a_parameter_that_nobody_used(home: Home) -> None:
    """Its gradient stays None, so that weight decay does not move it."""
    run = Run(home)
    run.over(5)
    compare(home, run.states, reference(home, [range(3), range(3, 5)]))


def a_parameter_used_only_early(home: Home) -> None:
    """It is used in held micro-batches, and not at the boundary."""
    run = Run(home)
    run.only_first_after = 1
    for index in range(6):
        run(index)

    def weigh(model: Any, items: list[Item]) -> torch.Tensor:
        return torch.stack([mean_of(model(data(*i), only_first=i[1] % 3 > 1)) for i in items]).sum() / len(items)

    compare(home, run.states, reference(home, [range(3), range(3, 6)], weigh))


def a_layer_that_some_ranks_leave_out(home: Home) -> None:
    """Inside its own forward, by turns: each rank uses it once a window at least."""
    run, second = Run(home), second_block(home.model)
    for index in range(6):
        second.is_left_out = _is_left_out(home.rank, index)
        run(index)
    second.is_left_out = False

    def weigh(model: Any, items: list[Item]) -> torch.Tensor:
        losses = []
        for rank, index in items:
            second_block(model).is_left_out = _is_left_out(rank, index)
            losses.append(mean_of(model(data(rank, index))))
        return torch.stack(losses).sum() / len(items)

    compare(home, run.states, reference(home, [range(3), range(3, 6)], weigh))


def _is_left_out(rank: int, index: int) -> bool:
    return (rank + index) % 2 == 1
