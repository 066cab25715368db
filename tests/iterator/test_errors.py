"""Misuse of `sync_every`, and what is told."""

from __future__ import annotations

import pytest

import gradsync
from gradsync import GradSyncError
from tests.support.models import small_model
from tests.support.reference import mean_loss, micro_batch

X = micro_batch(0, 0)


def test_two_backwards_in_a_micro_step():
    model = small_model()
    with pytest.raises(GradSyncError, match="runs one backward, .* micro-step 0 of window 0 ran a second one. Add the losses up"):
        for step, x in gradsync.sync_every(model, 2, [X, X]):
            step.backward(mean_loss(model, x))
            step.backward(mean_loss(model, x))


def test_a_backward_out_of_turn():
    model = small_model()
    steps = []
    with pytest.raises(GradSyncError, match="ran one out of turn"):
        for step, x in gradsync.sync_every(model, 2, [X, X]):
            steps.append(step)
            steps[0].backward(mean_loss(model, x))


@pytest.mark.parametrize("explicit", [True, False])
def test_a_boundary_without_a_backward(explicit):
    model = small_model()
    with pytest.raises(GradSyncError, match="must run a backward, which synchronises the window, but that of window 0"):
        for step, x in gradsync.sync_every(model, 2, [X, X, X]):
            if not step.last:
                step.backward(mean_loss(model, x)) if explicit else mean_loss(model, x).backward()


@pytest.mark.parametrize("call", [lambda: gradsync.no_sync("x"), lambda: gradsync.sync_gradients(3),
                                  lambda: gradsync.sync_every(None, 2), lambda: gradsync.no_sync()])
def test_what_is_no_module(call):
    with pytest.raises(TypeError, match="needs modules, but one argument is a |needs at least one module"):
        call()
