"""What is in a state, and whose window it is."""

from __future__ import annotations

import copy

import torch

from gradsync import accumulating
from tests.resume.runs import CLIP, Run
from tests.support.compare import assert_equal_state
from tests.support.files import is_plain, through_a_file
from tests.support.models import small_model
from tests.support.reference import mean_loss, micro_batch


def test_a_state_is_plain_and_its_own():
    """Numbers, strings, lists, dicts and tensors; later calls do not reach into it."""
    run = Run(CLIP)
    for i in range(4):
        run.call(i)
    state = run.step.state_dict()
    kept = copy.deepcopy(state)

    assert is_plain(state) and set(state["windows"][0]["open"]["gradients"]) == dict(run.model.named_parameters()).keys()
    run.call(4)
    assert repr(state) == repr(kept)
    again = Run(CLIP)
    again.step.load_state_dict(state)
    again.call(4)
    run.step.reset()
    again.step.reset()
    assert repr(state) == repr(kept), "loading takes copies"


def test_progress_is_known_before_the_first_call():
    run = Run()
    for i in range(5):
        run.call(i)
    again = Run()
    assert again.step.progress.micro_steps == 0
    again.step.load_state_dict(run.step.state_dict())
    now, then = again.step.progress, run.step.progress
    for name in ("micro_steps", "updates", "window", "index", "size", "skipped", "dropped", "replays"):
        assert getattr(now, name) == getattr(then, name), name
    assert repr(again.step.state_dict()) == repr(run.step.state_dict()), "saved again before the first call"
    run.step.reset()


def test_several_windows_of_one_function():
    """They are told apart by the order of their first call."""

    def made():
        models = [small_model() for _ in range(2)]
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.1 + i) for i, model in enumerate(models)]
        step = accumulating(steps=3)(lambda model, optimizer, i: mean_loss(model, micro_batch(0, i)))
        return step, models, optimizers

    def call(run, i):
        step, models, optimizers = run
        for _ in range(1 + i % 2):  # the second is called more often
            step(models[0], optimizers[0], i)
        step(models[1], optimizers[1], i)

    whole = made()
    for i in range(10):
        call(whole, i)
    for stop in range(1, 10):
        half = made()
        for i in range(stop):
            call(half, i)
        weights = [model.state_dict() for model in half[1]]
        state = through_a_file(half[0].state_dict())
        half[0].reset()
        again = made()
        again[0].load_state_dict(state)
        assert again[0].progress.micro_steps == half[0].progress.micro_steps, "of the one that was called last"
        for model, one in zip(again[1], weights):
            model.load_state_dict(one)
        for i in range(stop, 10):
            call(again, i)
        for a, b in zip(whole[1], again[1], strict=True):
            assert_equal_state(a.state_dict(), b.state_dict())
        assert repr(whole[0].state_dict()) == repr(again[0].state_dict())
        again[0].reset()
    whole[0].reset()


def test_a_window_that_was_not_called_before_the_state_was_saved_begins_anew():
    run = Run()
    empty = run.step.state_dict()
    assert empty["windows"] == []
    run.call(0)
    run.step.load_state_dict(empty)
    assert run.step.progress.micro_steps == run.step.progress.index == 0
    assert all(p.grad is None for p in run.model.parameters())


class Trainer:
    def __init__(self):
        self.model = small_model()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

    @accumulating(steps=3, model=lambda self, *_: self.model, optimizer=lambda self, *_: self.optimizer)
    def train_step(self, i):
        return mean_loss(self.model, micro_batch(0, i))


def test_methods_have_states_of_their_own():
    """A state that waits for one instance's first call is not taken by another's, nor by one that gets its id."""
    saved = Trainer()
    for i in range(5):
        saved.train_step(i)
    state = through_a_file(saved.train_step.state_dict())
    assert Trainer.train_step.state_dict()["windows"] == []
    one, other = Trainer(), Trainer()
    one.train_step.load_state_dict(state)
    assert (one.train_step.progress.micro_steps, other.train_step.progress.micro_steps) == (5, 0)
    other.train_step(0)
    assert other.train_step.progress.micro_steps == 1
    one.model.load_state_dict(saved.model.state_dict())
    for trainer in (one, saved):
        trainer.train_step(5)
        assert trainer.train_step.progress.updates == 2
    assert_equal_state(one.model.state_dict(), saved.model.state_dict())
    other.train_step.reset()
    for _ in range(20):  # whichever of these gets the id of one that died waiting
        waiting = Trainer()
        assert waiting.train_step.progress.micro_steps == 0
        waiting.train_step.load_state_dict(state)
        del waiting
