"""What `progress` says, and the profiler's ranges."""

from __future__ import annotations

import gc
import pytest
import torch

import gradsync
from gradsync import accumulating
from tests.support.models import small_model
from tests.support.recorder import Recorder
from tests.support.reference import mean_loss, micro_batch


def test_progress_is_a_frozen_record():
    step = accumulating(steps=3)(lambda model, optimizer, x: mean_loss(model, x))
    assert step.progress.micro_steps == 0 and step.progress.loss is None
    model = small_model()
    optimizer = Recorder(model.parameters())
    records, losses = [], []
    for i in step.over(range(5)):
        losses.append(step(model, optimizer, micro_batch(0, i)).clone())
        records.append(step.progress)
    assert [r.micro_steps for r in records] == [1, 2, 3, 4, 5]
    assert [r.window for r in records] == [0, 0, 1, 1, 2]
    assert [r.index for r in records] == [1, 2, 0, 1, 0]
    assert [r.updates for r in records] == [0, 0, 1, 1, 2]
    assert [r.stepped for r in records] == [False, False, True, False, True]
    assert {r.size for r in records} == {3}
    assert records[2].loss.item() == pytest.approx(sum(losses[:3]).item() / 3, rel=1e-12)
    assert records[3].loss.item() == records[2].loss.item()
    assert records[4].loss.item() == pytest.approx(sum(losses[3:]).item() / 2, rel=1e-12)
    with pytest.raises(AttributeError):
        records[0].micro_steps = 7


def test_profiler_ranges():
    step = accumulating(steps=2)(lambda model, optimizer, x: mean_loss(model, x))
    model = small_model()
    optimizer = Recorder(model.parameters())
    with torch.profiler.profile() as profile:
        for i in range(4):
            step(model, optimizer, micro_batch(0, i))
        for micro, x in gradsync.sync_every(model, 2, [micro_batch(0, i) for i in range(2)]):
            micro.backward(mean_loss(model, x))
    counts = {e.key: e.count for e in profile.key_averages() if e.key.startswith("gradsync.")}
    assert counts == {"gradsync.hold": 3, "gradsync.sync": 3, "gradsync.update": 2}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("returned", "weight_of_all"), [(lambda loss: loss, 4), (lambda loss: gradsync.LossSum(loss, 2), 8)], ids=["mean", "sum"]
)
def test_losses_of_low_precision_are_added_up_exactly(dtype, returned, weight_of_all):
    """The sum of four would be infinite in float16, or would lose three of them in bfloat16."""
    weight = torch.nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.SGD(weight.parameters(), lr=0.0)
    losses = [30000.0] * 4 if dtype == torch.float16 else [256.0, 1.0, 1.0, 1.0]

    @gradsync.accumulating(4)
    def step(model, optimizer, value):
        return returned((model.weight.sum() * 0 + value).to(dtype))

    for value in step.over(losses):
        step(weight, optimizer, value)
    expected = sum(losses) / weight_of_all
    assert step.progress.loss.item() == step.progress.global_loss == expected


def test_the_progress_of_what_is_gone():
    """A loop in a function of its own has ended, and its optimizer with it."""
    step = gradsync.accumulating(2)(lambda model, optimizer, x: model(x).sum())

    def train() -> None:
        model = torch.nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for x in step.over(torch.ones(4, 1)):
            step(model, optimizer, x)

    train()
    gc.collect()
    assert (step.progress.updates, step.progress.micro_steps) == (2, 4)
    assert step.progress.loss is not None
