"""Errors about what the decorator does itself, and the body did too; about windows that meet."""

from __future__ import annotations

import gc

import pytest
import torch
import torch.distributed as dist

from gradsync import GradSyncError, LossSum, accumulating
from tests.support.models import small_model
from tests.support.recorder import Recorder
from tests.support.reference import mean_loss, micro_batch

X = micro_batch(0, 0)


def made(**kwargs):
    model = small_model()
    optimizer = Recorder(model.parameters())
    step = accumulating(steps=2, **kwargs)(lambda model, optimizer, x: mean_loss(model, x))
    return step, model, optimizer


def test_two_kinds_of_loss_in_a_window():
    _, model, optimizer = made()
    step = accumulating(steps=2)(lambda model, optimizer, is_sum: LossSum(model(X).sum(), 3) if is_sum else model(X).sum())
    step(model, optimizer, True)
    with pytest.raises(GradSyncError, match="must be of one kind, but a LossSum and a mean came"):
        step(model, optimizer, False)


def test_another_model_in_the_middle_of_a_window():
    """Its parameters are in the same optimizer; between windows that is allowed."""
    models = [small_model(), small_model()]
    optimizer = torch.optim.SGD([p for model in models for p in model.parameters()], lr=0.1)
    step = accumulating(steps=2)(lambda model, optimizer: mean_loss(model, X))
    step(models[0], optimizer)
    with pytest.raises(GradSyncError, match="same models throughout a window, but they changed .* Call flush"):
        step(models[1], optimizer)
    step.flush()
    for _ in range(2):
        step(models[1], optimizer)
    assert step.progress.updates == 2


def test_a_flush_after_the_model_has_gone():
    step, model, optimizer = made()
    for _ in range(2):
        step(model, optimizer, X)
    del model
    gc.collect()
    with pytest.raises(GradSyncError, match="must be alive as long as it has windows to open or to close"):
        step.flush()


@pytest.mark.parametrize("when", [0, 1, 2, 3])
def test_a_body_that_runs_backward(when):
    _, model, optimizer = made()

    @accumulating(steps=2)
    def step(model, optimizer, i):
        loss = mean_loss(model, X)
        if i == when:
            loss.backward(retain_graph=True)
        return loss

    for i in range(when):
        step(model, optimizer, i)
    with pytest.raises(GradSyncError, match="step runs backward, step and zero_grad itself, but .* ran backward on them"):
        step(model, optimizer, when)


def in_the_body(step, model, optimizer, meddle) -> None:
    """A call in whose body somebody meddles."""
    step(model, optimizer, meddle)


def between(step, model, optimizer, meddle) -> None:
    meddle()
    step(model, optimizer)


def meddled(model, optimizer, meddle=lambda: None):
    meddle()
    return mean_loss(model, X)


@pytest.mark.parametrize("at", [0, 1])
def test_the_body_steps_the_optimizer(at):
    _, model, optimizer = made()
    step = accumulating(steps=3)(meddled)
    for _ in range(at):
        step(model, optimizer)
    with pytest.raises(GradSyncError, match="steps its optimizer itself at each boundary, but something called optimizer.ste"):
        step(model, optimizer, optimizer.step)
    step.reset()


@pytest.mark.parametrize("calls", [1, 2])
def test_somebody_else_steps_the_optimizer(calls):
    _, model, optimizer = made()
    step = accumulating(steps=3)(meddled)
    for _ in range(calls):
        step(model, optimizer)
    with pytest.raises(GradSyncError, match="steps its optimizer itself at each boundary, but something called optimizer.ste"):
        optimizer.step()
    step.reset()


def in_the_backward(model):
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(lambda p, its=torch.optim.SGD([p], lr=0.1): its.step())
    return lambda: None


def made_anew(model):
    return torch.optim.SGD(model.parameters(), lr=0.1).step


def of_one_layer(model):
    return torch.optim.SGD(model[-1].parameters(), lr=0.1).step


@pytest.mark.parametrize("another", [in_the_backward, made_anew, of_one_layer])
def test_another_optimizer_steps_the_same_parameters(another):
    """Each rank on gradients of its own: the replicas would part."""
    _, model, optimizer = made()
    step_it = another(model)
    step = accumulating(steps=2)(lambda model, optimizer: mean_loss(model, X))
    with pytest.raises(GradSyncError, match="called optimizer.step.*, of type SGD, in the middle of a window"):
        step(model, optimizer)
        step_it()
    step.reset()


def test_another_optimizer_steps_other_parameters():
    _, model, optimizer = made()
    other = small_model()
    theirs = torch.optim.SGD(other.parameters(), lr=0.1)
    step = accumulating(steps=2)(lambda model, optimizer: mean_loss(model, X))
    for _ in range(4):
        step(model, optimizer)
        mean_loss(other, X).backward()
        theirs.step()
    assert step.progress.updates == 2


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("where", [in_the_body, between])
def test_gradients_that_vanish(set_to_none, where):
    _, model, optimizer = made()
    step = accumulating(steps=3)(meddled)
    step(model, optimizer)
    with pytest.raises(GradSyncError, match="vanished: something called zero_grad" if set_to_none else "changed"):
        where(step, model, optimizer, lambda: optimizer.zero_grad(set_to_none=set_to_none))


TOUCHES = {
    "a backward of one layer": lambda last: last.weight.square().sum().backward(),
    "clipping one layer": lambda last: torch.nn.utils.clip_grad_norm_(last.parameters(), 1e-3),
    "zero_grad of one layer": lambda last: last.zero_grad(),
    "a gradient of one's own": lambda last: setattr(last.bias, "grad", torch.ones_like(last.bias)),
    "noise on one gradient": lambda last: last.bias.grad.add_(1.0),
}


@pytest.mark.parametrize("window", [0, 1])
@pytest.mark.parametrize("where", [in_the_body, between])
@pytest.mark.parametrize("touch", TOUCHES.values(), ids=TOUCHES)
def test_gradients_that_somebody_touched_in_part(touch, where, window):
    _, model, optimizer = made()
    step = accumulating(steps=3)(meddled)
    for _ in range(3 * window + 1):
        step(model, optimizer)
    with pytest.raises(GradSyncError, match="the gradients (vanished|changed)"):
        where(step, model, optimizer, lambda: touch(model[-1]))


def test_gradients_of_what_no_optimizer_has_are_their_users():
    """An auxiliary layer with a loop of its own, in the middle of the windows of the rest."""
    _, model, _ = made()
    ours, theirs = Recorder(model[0].parameters()), torch.optim.SGD(model[-1].parameters(), lr=0.0)
    step = accumulating(steps=2)(lambda model, optimizer: mean_loss(model, X))
    for _ in range(4):
        step(model, ours)
        model[-1].weight.square().sum().backward()
        theirs.step()
        theirs.zero_grad()
    assert step.progress.updates == 2


def test_gradients_left_from_before():
    step, model, optimizer = made()
    mean_loss(model, X).backward()
    with pytest.raises(GradSyncError, match="must begin without gradients, but 4 parameters have one .*zero_grad"):
        step(model, optimizer, X)


def test_one_parameter_in_two_windows():
    _, model, optimizer = made()

    @accumulating(steps=2)
    def first(model, optimizer):
        return mean_loss(model, X)

    @accumulating(steps=2)
    def second(model, optimizer):
        return mean_loss(model, X)

    first(model, optimizer)
    with pytest.raises(GradSyncError, match=r"second begins one .* open window of first. Call first.flush\(\) or"):
        second(model, optimizer)
    first.reset()


def test_a_step_that_calls_itself():
    _, model, optimizer = made()

    @accumulating(steps=2)
    def step(model, optimizer):
        return step(model, optimizer)

    with pytest.raises(GradSyncError, match="must not be called from its own body"):
        step(model, optimizer)


def call_from_on_update(lengths: list[int]) -> None:
    """Ranks that have run out make their last updates after their loop: a call there would be one too many."""
    _, model, optimizer = made()

    @accumulating(steps=2, on_update=lambda progress: step(model, optimizer, 0))
    def step(model, optimizer, i):
        return mean_loss(model, X)

    with pytest.raises(GradSyncError, match="must not be called from its own body or on_update"):
        for i in step.over(range(lengths[dist.get_rank()])):
            step(model, optimizer, i)


def test_a_call_from_on_update(ranks):
    ranks(1).run(call_from_on_update, [5])
    ranks(2).run(call_from_on_update, [4, 1])


@pytest.mark.parametrize(("close", "needs_a_state"), [("flush", False), ("reset", False), ("load_state_dict", True)])
def test_a_body_that_closes_its_own_window(close, needs_a_state):
    _, model, optimizer = made()

    @accumulating(steps=2)
    def step(model, optimizer, x, closes):
        loss = mean_loss(model, x)
        if closes:
            getattr(step, close)(*[state] * needs_a_state)
        return loss

    state = step.state_dict()
    step(model, optimizer, X, False)
    with pytest.raises(GradSyncError, match=rf"{close}\(\) of .*step came in the middle of a call"):
        step(model, optimizer, X, True)
    for closes in (False, False):
        step(model, optimizer, X, closes)
    assert step.progress.updates == 1


def test_a_state_from_somewhere_else():
    step, model, optimizer = made()
    with pytest.raises(ValueError, match="version None"):
        step.load_state_dict({})


def test_zeros_are_no_gradients_of_ones_own():
    """`zero_grad(set_to_none=False)` after a backward of one's own, before the first window and between two."""
    _, model, optimizer = made()
    step = accumulating(steps=2)(lambda model, optimizer: mean_loss(model, X))
    for _ in range(2):
        mean_loss(model, X).backward()
        optimizer.zero_grad(set_to_none=False)
        for _ in range(2):
            step(model, optimizer)
    assert step.progress.updates == 2
