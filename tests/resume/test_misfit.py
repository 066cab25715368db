"""A state that does not fit is refused."""

from __future__ import annotations

import re

import pytest
import torch
import torch.distributed as dist

from gradsync import GradSyncError, accumulating
from tests.resume.runs import SCALER, Run
from tests.support.models import small_model
from tests.support.reference import mean_loss, micro_batch


def after(calls: int) -> dict:
    run = Run()
    for i in range(calls):
        run.call(i)
    state = run.step.state_dict()
    run.step.reset()
    return state


def stepping(steps, **kwargs):
    return accumulating(steps=steps, **kwargs)(lambda model, optimizer, x: mean_loss(model, x))


@pytest.mark.parametrize("calls", [4, 6])
@pytest.mark.parametrize("live", [True, False])
def test_other_steps(calls, live):
    step, model = stepping(5), small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if live:
        step(model, optimizer, micro_batch(0, 0))
    text = "can be loaded with the steps that it was saved with, 3, but there are 5. Use the same; or, if it was saved at a"
    with pytest.raises(GradSyncError, match=re.escape(text)):
        step.load_state_dict(after(calls))
    assert step.progress.index == live, "and nothing has changed"
    step.reset()


def test_steps_that_are_functions_are_compared_in_an_open_window():
    stepping(lambda window: 7).load_state_dict(after(6))
    with pytest.raises(GradSyncError, match="was saved with, 3, but there are 7"):
        stepping(lambda window: 7).load_state_dict(after(4))


def test_other_parameters():
    """Names and shapes, at the first call if the state was loaded before it; it goes on waiting then."""
    step, small, large = stepping(3), small_model(), torch.nn.Linear(3, 4).double()
    step.load_state_dict(after(4))
    text = "parameters that it was saved for, names and shapes, but these differ in 0.bias, 0.weight, 2.bias, 2.weight, bias"
    other = torch.optim.SGD(large.parameters(), lr=0.1)
    for _ in range(2):
        with pytest.raises(GradSyncError, match=re.escape(text) + ".*same models and optimizers"):
            step(large, other, micro_batch(0, 0))
        assert step.progress.micro_steps == 4
    del other
    optimizer = torch.optim.SGD(small.parameters(), lr=0.1)
    step(small, optimizer, micro_batch(0, 0))
    assert step.progress.micro_steps == 5
    step.reset()
    small[2] = torch.nn.Linear(5, 3).double()
    with pytest.raises(GradSyncError, match=re.escape("differ in 2.bias, 2.weight. Call")):
        step = stepping(3)
        step.load_state_dict(after(3))
        step(small, torch.optim.SGD(small.parameters(), lr=0.1), micro_batch(0, 0))


def test_nothing_is_loaded_if_one_window_does_not_fit():
    step, models = stepping(3), [small_model(), torch.nn.Linear(3, 4).double()]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    for model, optimizer in zip(models, optimizers):
        step(model, optimizer, micro_batch(0, 0))
    state, wrong = step.state_dict(), after(4)
    with pytest.raises(GradSyncError, match="names and shapes"):
        step.load_state_dict({**wrong, "windows": [wrong["windows"][0]] * 2})
    assert repr(step.state_dict()) == repr(state)
    step.reset()


def a_state_for_other_ranks() -> str:
    """It was saved by one process, and is loaded on two."""
    run = Run(rank=dist.get_rank())
    run.call(0)
    state = run.step.state_dict()
    run.step.reset()
    state["windows"][0]["num_ranks"] = 1
    run.step.load_state_dict  # noqa: B018
    try:
        run.step.load_state_dict(state)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def test_other_ranks(ranks):
    """What one process saved does not fit two, nor the other way round."""
    state = after(4)
    state["windows"][0]["num_ranks"] = 2
    run = Run()
    run.step.load_state_dict(state)
    with pytest.raises(GradSyncError, match="as many ranks as it was saved on, 2, but there are 1. Start that many; or, if"):
        run.call(0)
    for said in ranks(2).run(a_state_for_other_ranks):
        assert said.startswith("GradSyncError: A state of") and "saved on, 1, but there are 2" in said


def test_a_scaler_that_was_left_behind():
    """The held gradients keep the scale that they had, and are brought to the scaler's own at the boundary."""
    run = Run(SCALER)
    for i in range(4):
        run.call(i)
    state = run.save()
    run.step.reset()
    again, twin = Run(SCALER), Run(SCALER)
    del state["other 0"]
    for name, one in state.items():
        again.stateful[name].load_state_dict(one)
    for i in (4, 5):
        again.call(i)
    for i in range(6):
        twin.call(i)
    assert all(torch.equal(a, b) for a, b in zip(again.model.parameters(), twin.model.parameters(), strict=True))


@pytest.mark.parametrize(
    ("state", "text"),
    [({}, "version 2, but what came has version None"), ([1], "what came is of type list"), ({"version": 1}, "version 1")],
)
def test_what_is_no_state(state, text):
    with pytest.raises(ValueError, match=text):
        Run().step.load_state_dict(state)
