"""A loaded state that holds an open window, and what may come before its first call, or at it."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist

from gradsync import GradSyncError, accumulating
from tests.support.compare import assert_equal_state
from tests.support.homes import HOMES
from tests.support.models import net, small_model
from tests.support.reference import mean_loss, mean_of, micro_batch, states, window_mean
from tests.support.training import data
from tests.support.verdicts import Verdict, refused, verdict, verdicts


def stepping(**named):
    return accumulating(steps=4, **named)(lambda model, optimizer, x: mean_loss(model, x))


def participants(dtype=torch.float64):
    model = small_model(dtype)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def after_two(rank: int = 0) -> dict:
    """The state of a window of four after two micro-batches."""
    step, (model, optimizer) = stepping(), participants()
    for index in range(2):
        step(model, optimizer, micro_batch(rank, index))
    state = copy.deepcopy(step.state_dict())
    step.reset()
    return state


def loaded(**named):
    step = stepping(**named)
    step.load_state_dict(after_two())
    return step


def into_a_frozen_layer(engine: str) -> Verdict:
    def step_and_home(frozen: bool):
        step = accumulating(steps=4)(lambda model, optimizer, x: mean_of(model(x)))
        model = net()
        model.first.up.weight.requires_grad_(not frozen)
        home = HOMES[engine].make(model)
        return step, home.model, torch.optim.SGD(home.model.parameters(), lr=0.1)

    step, model, optimizer = step_and_home(frozen=False)
    for index in range(2):
        step(model, optimizer, data(dist.get_rank(), index))
    state = copy.deepcopy(step.state_dict())
    step.reset()
    step, model, optimizer = step_and_home(frozen=True)
    step.load_state_dict(state)
    said = verdict(lambda: step(model, optimizer, data(dist.get_rank(), 2)))
    step.reset()
    return said


@pytest.mark.parametrize("engine", ["bare", "ddp", "fsdp2"])
def test_a_layer_frozen_since_is_refused_on_every_rank(ranks, engine) -> None:
    """Its gradient would be stepped with, and not synchronised."""
    refused(verdicts(ranks(2), into_a_frozen_layer, engine), "first.up.weight", "frozen", "between windows")


@pytest.mark.parametrize(("frozen", "dtype"), [(True, torch.float64), (False, torch.float32)], ids=["thawed", "float32"])
def test_what_a_window_held_must_be_as_it_was(frozen, dtype) -> None:
    step, (model, optimizer) = stepping(), participants()
    model[0].bias.requires_grad_(not frozen)
    for index in range(2):
        step(model, optimizer, micro_batch(0, index))
    state = step.state_dict()
    step.reset()
    step, (model, optimizer) = stepping(), participants(dtype)
    step.load_state_dict(state)
    for _ in range(2):  # as long as it does not fit, each call says so
        with pytest.raises(GradSyncError, match=r"0\.bias"):
            step(model, optimizer, micro_batch(0, 2).to(dtype))
        assert step.progress.index == 2
    step.reset()


def test_between_windows_a_layer_may_be_frozen_and_cast() -> None:
    step, (model, optimizer) = stepping(), participants()
    for index in range(4):
        step(model, optimizer, micro_batch(0, index))
    state = step.state_dict()
    step, (model, optimizer) = stepping(), participants(torch.float32)
    model[0].bias.requires_grad_(False)
    step.load_state_dict(state)
    step(model, optimizer, micro_batch(0, 0).float())
    assert step.progress.micro_steps == 5
    step.reset()


@pytest.mark.parametrize("scales", [(16.0, None), (None, 16.0)])
def test_a_scaler_that_comes_or_goes_is_refused(scales) -> None:
    def scaled(scale):
        scaler = None if scale is None else torch.amp.GradScaler("cpu", init_scale=scale)
        return accumulating(steps=4, scaler=() if scaler is None else scaler)(lambda model, optimizer, x: mean_loss(model, x))

    (model, optimizer), step = participants(torch.float32), scaled(scales[0])
    for index in range(2):
        step(model, optimizer, micro_batch(0, index).float())
    state = step.state_dict()
    step.reset()
    step = scaled(scales[1])
    step.load_state_dict(state)
    for _ in range(2):
        with pytest.raises(GradSyncError, match="GradScaler"):
            step(model, optimizer, micro_batch(0, 2).float())
    step.reset()


def test_a_load_that_failed_for_another_reason_is_tried_again() -> None:
    """Another function's window is in the way at the first call; once that is reset, the state comes in, whole."""
    model, optimizer = participants()
    other, step = stepping(), loaded()
    other(model, optimizer, micro_batch(0, 9))
    with pytest.raises(GradSyncError, match="one open window at a time"):
        step(model, optimizer, micro_batch(0, 2))
    other.reset()
    for index in (2, 3):
        step(model, optimizer, micro_batch(0, index))
    [expected] = states(small_model(), [[(0, index) for index in range(4)]], window_mean)
    assert_equal_state(model.state_dict(), expected, 1e-12)
    assert (step.progress.micro_steps, step.progress.updates) == (4, 1)


@pytest.mark.parametrize("named", [False, True])
def test_reset_discards_what_was_loaded(named) -> None:
    model, optimizer = participants()
    step = loaded(**({"model": model, "optimizer": optimizer} if named else {}))
    step.reset()
    assert (step.progress.index, step.progress.micro_steps) == (0, 2)
    for index in range(4, 8):
        step(model, optimizer, micro_batch(0, index))
    [expected] = states(small_model(), [[(0, index) for index in range(4, 8)]], window_mean)
    assert_equal_state(model.state_dict(), expected, 1e-12)


def test_flush_needs_the_participants_of_what_was_loaded() -> None:
    step = loaded()
    with pytest.raises(GradSyncError, match="flush.*2 micro-batches.*model="):
        step.flush()
    step.reset()
    step.flush()
    model, optimizer = participants()
    step = loaded(model=model, optimizer=optimizer)
    step.flush()
    [expected] = states(small_model(), [[(0, 0), (0, 1)]], window_mean)
    assert_equal_state(model.state_dict(), expected, 1e-12)
