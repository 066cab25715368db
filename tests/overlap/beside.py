"""What runs on the ranks for test_beside.py: buffers, hooks, other functions and lost ranks beside gradients that travel."""

from __future__ import annotations

import copy
import warnings
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import gradsync
from tests.overlap.decorated import Training
from tests.overlap.events import in_flight, same
from tests.overlap.loop import Model, Plan, parameters_of
from tests.support.models import small_model
from tests.support.reference import mean_loss, micro_batch

STEPS = 3


class Normalised(nn.Module):
    """BatchNorm first, so that its buffers depend on nothing but the data; and a buffer of another dtype."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.norm, self.linear = nn.BatchNorm1d(3), nn.Linear(3, 2)
        self.register_buffer("odd", torch.zeros(3, dtype=torch.bool))

    def forward(self, x):
        self.odd ^= x.sum(0) > 0
        return self.linear(self.norm(x))


class Later:
    """An all-reduce that begins when somebody waits for it."""

    def __init__(self, begin) -> None:
        self.wait = begin


def buffers_of(model) -> list[torch.Tensor]:
    return [buffer.clone() for buffer in model.buffers()]


def expected_buffers(windows) -> list[list[torch.Tensor]]:
    """After each window those of the lowest rank that has a micro-batch in it, from those after the one before."""
    model, states = Normalised(), []
    for items in windows:
        lowest = min(rank for rank, _ in items)
        for rank, index in items:
            if rank == lowest:
                model(micro_batch(rank, index, dtype=torch.float32))
        states.append(buffers_of(model))
    return states


def normalised(kind: str, lengths, m: int, lazily: bool) -> tuple[list[list[torch.Tensor]], list[list[str]]]:
    """The buffers as each window closed, and what each window sent, in order; `lazily`: gradients leave as they land."""
    rank = dist.get_rank()
    model = Normalised()
    used = DDP(model) if kind == "ddp" else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    @gradsync.accumulating(STEPS, model=used, optimizer=optimizer, overlap=m, skip=KeyError)
    def step(index):
        return mean_loss(used, micro_batch(rank, index, dtype=torch.float32))

    states, sent = [], [[]]
    all_reduce, broadcast = dist.all_reduce, dist.broadcast

    def reducing(tensor, *args, **kwargs):
        if tensor.dtype == torch.float64 and tensor.dim() == 2:
            sent[-1].append("table" if tensor.shape[1] > 1 else "failures")
            return all_reduce(tensor, *args, **kwargs)
        sent[-1].append("gradients")
        if not lazily or not kwargs.get("async_op"):
            return all_reduce(tensor, *args, **kwargs)
        return Later(lambda: all_reduce(tensor, group=kwargs["group"]))

    def broadcasting(tensor, *args, **kwargs):
        sent[-1].append("buffers")
        return broadcast(tensor, *args, **kwargs)

    dist.all_reduce, dist.broadcast = reducing, broadcasting
    try:
        for index in step.over(range(lengths[rank])):
            window = step.progress.window
            step(index)
            if step.progress.window > window:
                states.append(buffers_of(model))
                sent.append([])
        if step.progress.window > len(states):
            states.append(buffers_of(model))
    finally:
        dist.all_reduce, dist.broadcast = all_reduce, broadcast
    return states, sent


def told_to_hooks() -> None:
    """An EMA in a step hook sees the true parameters, once an update."""
    training, averages, seen = Training(Plan((), 2)), [], []

    def after_step(*_) -> None:
        seen.append(parameters_of(training.model))
        average = [p.clone() for p in seen[-1]] if not averages else averages[-1]
        averages.append([0.9 * a + 0.1 * p for a, p in zip(average, seen[-1])])

    training.optimizer.register_step_post_hook(after_step)
    for index in training.step.over(range(12)):
        training.step(index)
    assert len(seen) == len(training.seen) == 4
    assert all(same(one, other) for one, other in zip(seen, training.seen))


def two_functions() -> None:
    """With a model and an optimizer each, turn by turn: as each alone, to the bit."""

    def make(seed):
        torch.manual_seed(seed)
        model = small_model(torch.float64)
        return model, torch.optim.AdamW(model.parameters(), lr=0.05)

    def decorated(m, steps):
        return gradsync.accumulating(steps, overlap=m)(
            lambda model, optimizer, index: mean_loss(model, micro_batch(dist.get_rank(), index))
        )

    alone = []
    for seed, m, steps in ((1, 2, 3), (2, 1, 2)):
        model, optimizer = make(seed)
        step = decorated(m, steps)
        for index in step.over(range(9)):
            step(model, optimizer, index)
        alone.append(parameters_of(model))
    both = [(*make(seed), decorated(m, steps)) for seed, m, steps in ((1, 2, 3), (2, 1, 2))]
    for index in both[0][2].over(both[1][2].over(range(9))):
        for model, optimizer, step in both:
            step(model, optimizer, index)
    assert all(same(parameters_of(model), expected) for (model, _, _), expected in zip(both, alone))


def two_models() -> None:
    """One function with two models and an optimizer each: as one model with both inside and one optimizer, to rounding."""
    found = []
    for apart in (False, True):
        pair = nn.ModuleList([small_model(torch.float64), small_model(torch.float64)])
        optimizers = [torch.optim.AdamW(one.parameters(), lr=0.05) for one in pair]
        if not apart:
            optimizers = [torch.optim.AdamW(pair.parameters(), lr=0.05)]
        models = list(pair) if apart else [pair]

        @gradsync.accumulating(2, model=tuple(models), optimizer=tuple(optimizers), overlap=2, clip_norm=0.3)
        def step(index):
            x = micro_batch(dist.get_rank(), index)
            return mean_loss(pair[0], x) + mean_loss(pair[1], 2 * x)  # noqa: B023 - called at once

        for index in step.over(range(7 + dist.get_rank())):
            step(index)
        found.append(parameters_of(pair))
    for one, other in zip(*found):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def lost() -> str:
    """Rank 1 stops while gradients travel: rank 0's error says so, and its parameters are the last true ones."""
    group = dist.new_group(timeout=timedelta(seconds=2))
    model = Model()
    ddp = DDP(model.inner, process_group=group)
    optimizer = torch.optim.SGD(model.inner.parameters(), lr=0.1, momentum=0.9)
    true, text = [], ""

    @gradsync.accumulating(2, overlap=1, on_update=lambda _: true.append(parameters_of(model)))
    def step(model, optimizer, index):
        return mean_loss(model, micro_batch(dist.get_rank(), index))

    for index in range(3 + (dist.get_rank() == 0)):
        step(ddp, optimizer, index)
    assert len(true) == 1
    if dist.get_rank() == 0:  # the second window has closed, and is to land
        with pytest.raises(gradsync.GradSyncError) as caught:
            step(ddp, optimizer, 4)
        text = str(caught.value)
    assert same(true[-1], parameters_of(model))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        del step
    dist.barrier()
    return text


def copied_while_travelling() -> None:
    """A deepcopy of a model in flight is a model like any other."""
    training = in_flight()
    twin = copy.deepcopy(training.model)
    training.step.settle()
    assert len(training.seen) == 2
    assert not same(parameters_of(twin), training.parameters)
