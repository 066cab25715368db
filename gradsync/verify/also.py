"""Promises about options: `overlap`, `compress` and `fit`. Each function is a row of the table, as in `even`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

import gradsync
from gradsync.verify.compare import assert_equal_states, need
from gradsync.verify.models import net
from gradsync.verify.reference import mean_of
from gradsync.verify.training import DECAY, LR, Run, compare, data, data_of, optimizer_of, reference

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gradsync.verify.homes import Home
    from gradsync.verify.reference import Item, State

_BFLOAT16 = 2.0**-7  # how far sums in bfloat16 may be off, as a share of the largest


def overlap(home: Home) -> None:
    """Two windows. The second's first micro-batch runs on the step that each rank made with its own gradients."""
    run = Run(home, overlap=1)
    for index in range(6):
        run.step(home.model, run.optimizer, index)
    run.step.settle()
    need(run.step.progress.updates == 2, f"{run.step.progress.updates} updates, not 2")
    ranks = range(home.size)
    start: State = dict(net().named_parameters())
    first = _updated(start, [_gradient(start, [(rank, index) for rank in ranks for index in range(3)])])
    parts = [_gradient(first, [(rank, index) for index in (4, 5)]) for rank in ranks for _ in range(2)]
    for rank in ranks:
        provisional = _updated(start, [_gradient(start, [(rank, index) for index in range(3)])])
        parts.append(_gradient(provisional, [(rank, 3)]))
    compare(home, [home.full()], [_updated(first, parts)])


def _gradient(parameters: State, items: Sequence[Item]) -> State:
    """The mean gradient over some micro-batches, at these parameters."""
    leaves = {name: value.detach().requires_grad_() for name, value in parameters.items()}
    model = net()
    losses = [mean_of(torch.func.functional_call(model, leaves, (data(*item),))) for item in items]
    found = torch.autograd.grad(torch.stack(losses).mean(), list(leaves.values()))
    return dict(zip(leaves, found, strict=True))


def _updated(parameters: State, gradients: Sequence[State]) -> State:
    """The parameters after an update with the mean of some gradients."""
    means = {name: torch.stack([one[name] for one in gradients]).mean(0) for name in parameters}
    return {name: (value - LR * (means[name] + DECAY * value)).detach() for name, value in parameters.items()}


def compress(home: Home) -> None:
    """Parameters move by the right amount, to the precision of bfloat16."""
    run = Run(home, compress="bf16")
    for index in range(3):
        run(index)
    start = {name: value.detach() for name, value in net().named_parameters()}
    moved: list[Any] = [
        {name: value.cpu().double() - start[name] for name, value in state.items()}
        for state in (*run.states, *reference(home, [range(3)]))
        if isinstance(state, dict)
    ]
    assert_equal_states(moved[:1], moved[1:], _BFLOAT16)


def fit(home: Home) -> None:
    """A call that has no memory for three rows runs in two parts."""
    optimizer = optimizer_of(home)
    states: list[Any] = []

    @gradsync.accumulating(3, fit=True, **home.options)
    def step(model: Any, optimizer: Any, rows: torch.Tensor) -> torch.Tensor:  # noqa: ARG001 - it is found there
        if len(rows) > 2:
            raise torch.OutOfMemoryError("as a device says it")
        return _mean_over_rows(model(rows))

    for index in range(3):
        step(home.model, optimizer, data_of(home, index))
    need(step.progress.parts == 2, f"it ran in {step.progress.parts} parts, not 2")
    states.append(home.full())

    def weigh(model: Any, items: list[Item]) -> torch.Tensor:
        return torch.stack([_mean_over_rows(model(data(*item))) for item in items]).mean()

    compare(home, states, reference(home, [range(3)], weigh))


def _mean_over_rows(output: torch.Tensor) -> torch.Tensor:
    return output.square().mean() + output.mean()
