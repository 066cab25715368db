"""Errors say what was needed, what came, and what to do: at decoration and at the first call."""

from __future__ import annotations

import functools

import pytest
import torch

import gradsync
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


@pytest.mark.parametrize(
    ("steps", "kind", "text"),
    [
        (0, ValueError, "steps must be at least 1, the micro-batches in a window, but it is 0."),
        (-2, ValueError, "steps must be at least 1"),
        (2.0, TypeError, "steps must be a positive int, or steps a function of the window's number that returns one, but it "
                         "is 2.0 of type float. Write, for example, steps=4."),
        (True, TypeError, "steps must be a positive int"),
        ("4", TypeError, "but it is '4' of type str"),
        (None, TypeError, "but it is None"),
    ],
)  # fmt: skip
def test_steps(steps, kind, text):
    with pytest.raises(kind) as error:
        accumulating(steps=steps)
    assert text in str(error.value)
    with pytest.raises(kind) as error:
        gradsync.sync_every(small_model(), steps, [X])
    assert text in str(error.value)


def test_steps_that_return_nonsense():
    step = accumulating(steps=lambda window: 0)(lambda model, optimizer, x: mean_loss(model, x))
    with pytest.raises(ValueError, match=r"steps\(0\) must be at least 1"):
        step(*made()[1:], X)


def test_bare_decoration():
    with pytest.raises(TypeError, match=r"looks like the step function itself. Write @accumulating\(steps=4\), with its par"):

        @accumulating
        def step(model, optimizer, x):
            return mean_loss(model, x)


@pytest.mark.parametrize(
    ("keyword", "kind", "text"),
    [
        ({"tail": "keep"}, ValueError, "tail must be one of ('step', 'drop', 'carry'), but it is 'keep'."),
        ({"sync": "never"}, ValueError, "sync must be one of ('window', 'each', 'shard'), but it is 'never'."),
        ({"nonfinite": "ignore"}, ValueError, "nonfinite must be one of ('step', 'skip', 'raise'), but it is 'ignore'."),
        ({"clip_norm": 0}, ValueError, "clip_norm must be a positive number or None, but it is 0."),
        ({"skip": (int,)}, TypeError, "skip must be a tuple of exception types, but <class 'int'> is in it."),
    ],
)
def test_keywords(keyword, kind, text):
    with pytest.raises(kind) as error:
        accumulating(steps=2, **keyword)
    assert text in str(error.value)


def called(function):
    """An object whose call this is."""
    return type("Called", (), {"__call__": staticmethod(function)})()


def test_what_cannot_be_decorated():
    decorate = accumulating(steps=2)

    async def coroutine():
        pass

    def generator():
        yield

    async def both():
        yield

    for function, text in [
        (coroutine, "is an async function"),
        (generator, "is a generator function"),
        (both, "is an async generator function"),
        (called(coroutine), "is an async function"),
        (called(generator), "is a generator function"),
        (called(both), "is an async generator function"),
        (3, "accumulating decorates a step function, but got 3 of type int"),
        (small_model, None),
    ]:
        if text is None:
            decorate(function)
            continue
        with pytest.raises(TypeError) as error:
            decorate(function)
        assert text in str(error.value)


@pytest.mark.parametrize("kind", ["scheduler", "optimizer", "scaler"])
def test_a_default_does_not_take_part(kind):
    """It is an error where a call leaves it out: as a default, in a list of them, or bound by `partial`."""
    _, model, optimizer = made()
    one = {"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1), "optimizer": made()[2],
           "scaler": torch.amp.GradScaler("cpu")}[kind]  # fmt: skip

    def step(model, optimizer, x, other=one, *, loss=torch.nn.MSELoss(), teacher=small_model()):
        return mean_loss(model, x)

    def listed(model, optimizer, x, other=[one]):
        return mean_loss(model, x)

    for function in (step, listed, functools.partial(lambda model, optimizer, x, other: mean_loss(model, x), other=one)):
        decorated = accumulating(steps=2)(function)
        with pytest.raises(GradSyncError, match=rf"{kind} \(.*\) comes with the default of 'other', where it would be passed over"):
            decorated(model, optimizer, X)
    accumulating(steps=1)(step)(model, optimizer, X, None)
    accumulating(steps=1, **{kind: optimizer if kind == "optimizer" else one})(step)(model, optimizer, X)


def test_no_model_and_no_optimizer():
    step, model, optimizer = made()
    with pytest.raises(GradSyncError, match="needs a model among its arguments, but found none. .*model=model"):
        step(None, optimizer, X)
    with pytest.raises(GradSyncError, match="needs an optimizer among its arguments, but found none"):
        step(model, None, X)


def test_a_keyword_that_names_the_wrong_thing():
    step = accumulating(steps=2, model=lambda *_: "model")(lambda optimizer, x: X.sum())
    with pytest.raises(TypeError, match=r"accumulating\(model=...\) needs a Module, .* but it gave a str."):
        step(made()[2], X)


def test_an_optimizer_of_another_model():
    step, model, _ = made()
    with pytest.raises(GradSyncError, match="At least one model must have parameters in the optimizer, but none"):
        step(model, Recorder(small_model().parameters()), X)


def test_two_scalers():
    step = accumulating(steps=2)(lambda *args: mean_loss(args[0], X))
    scalers = torch.amp.GradScaler("cpu"), torch.amp.GradScaler("cpu")
    with pytest.raises(GradSyncError, match="needs one GradScaler at most, but two came"):
        step(*made()[1:], *scalers)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda o: torch.optim.LBFGS(o.param_groups[0]["params"]), "LBFGS.step needs 'closure'"),
        (lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o), "ReduceLROnPlateau.step needs 'metrics'"),
    ],
)
def test_steps_that_need_an_argument(make, text):
    step = accumulating(steps=2)(lambda model, *_: mean_loss(model, X))
    _, model, optimizer = made()
    with pytest.raises(TypeError) as error:
        step(model, optimizer, make(optimizer))
    assert text in str(error.value) and "gradsync.sync_every" in str(error.value)


def test_a_later_scheduler_that_needs_an_argument():
    """It is found before it could fail behind the optimizer's step."""
    step = accumulating(steps=1)(lambda model, *_: mean_loss(model, X))
    _, model, optimizer = made()
    step(model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1))
    for _ in range(2):
        with pytest.raises(TypeError, match="ReduceLROnPlateau.step needs 'metrics'"):
            step(model, optimizer, torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer))
    assert step.progress.updates == 1


@pytest.mark.parametrize(
    ("returned", "text"),
    [
        (None, "but what came is None. Return the unscaled loss."),
        ((), "a tuple of nothing"),
        (("x", 1), "a tuple of str, int"),
        ({"los": 1}, "a dict with the keys ['los']"),
        (3.0, "of type float"),
    ],
)
def test_a_loss_that_is_missing(returned, text):
    _, model, optimizer = made()
    step = accumulating(steps=2)(lambda model, optimizer: returned)
    with pytest.raises(GradSyncError) as error:
        step(model, optimizer)
    assert text in str(error.value) and "must return its loss" in str(error.value)


def test_a_loss_that_cannot_be_run_backward_from():
    _, model, optimizer = made()
    step = accumulating(steps=2)(lambda model, optimizer, make: make(model(X)))
    with pytest.raises(GradSyncError, match=r"must be a scalar or have one element, but its shape is \(4, 2\)"):
        step(model, optimizer, lambda y: y)
    with pytest.raises(GradSyncError, match="must need a gradient, but it has requires_grad=False"):
        step(model, optimizer, lambda y: y.sum().detach())
    with pytest.raises(GradSyncError, match="neither under torch.no_grad"), torch.no_grad():
        step(model, optimizer, lambda y: y.sum())
    with pytest.raises(TypeError, match="count of a LossSum must be an int, a float or a tensor, but it is of type str"):
        step(model, optimizer, lambda y: LossSum(y.sum(), "3"))
