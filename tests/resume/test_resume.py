"""What `state_dict` saves, `load_state_dict` goes on with, to the bit; a state that does not fit is refused."""

from __future__ import annotations

import copy
import re

import pytest
import torch

from gradsync import GradSyncError, accumulating
from tests.resume.runs import Run, finish, resumed_anywhere, same, through_a_file
from tests.support.reference import mean_loss, micro_batch, small_model

CASES = "tests.resume.runs:"
KINDS = [
    "mean", "sum", "sum float", "sum tensor", "scaler", "scheduler", "clip", "skip", "two models", "not in a module",
    "buffers", "unused", "function", "each", "carry",
]  # fmt: skip


# -- to the bit -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["calls", "flush", "over"])
@pytest.mark.parametrize("kind", KINDS)
def test_resumed_after_any_micro_batch(kind, how):
    resumed_anywhere(kind, how)


@pytest.mark.parametrize(
    ("kind", "how", "lengths"),
    [
        ("mean", "over", [7, 7]), ("mean", "flush", None), ("mean", "over", [5, 8]), ("mean", "over", [8, 5]),
        ("sum tensor", "over", [7, 7]), ("scaler", "over", [7, 7]), ("skip", "over", [7, 7]), ("carry", "over", [7, 7]),
        ("buffers", "over", [7, 7]), ("buffers", "over", [5, 8]), ("buffers ddp", "over", [7, 7]), ("ddp", "flush", None),
        ("static", "over", [7, 7]), ("views", "over", [7, 7]), ("find_unused", "over", [7, 7]), ("unused", "over", [7, 7]),
    ],
)  # fmt: skip
def test_resumed_after_any_micro_batch_on_two_ranks(ranks, kind, how, lengths):
    """Each rank saves its own gradients in the middle of a window, and loading does not communicate."""
    ranks(2).run(CASES + "resumed_anywhere", kind, how, lengths)


def test_a_state_goes_from_ddp_to_the_bare_model_and_back(ranks):
    ranks(2).run(CASES + "bare_and_ddp")


@pytest.mark.parametrize("stop", range(10))
def test_no_sample_is_skipped_or_seen_twice(ranks, stop):
    """The position is `progress.micro_steps`, as examples/resume.py has it, known before the first call."""
    seen = ranks(2).run(CASES + "every_sample_once", stop)
    for epoch in range(2):
        assert sorted(seen[0][epoch] + seen[1][epoch]) == list(range(30))


def test_a_state_is_plain_and_its_own():
    """Numbers, strings, lists, dicts and tensors; later calls do not reach into it."""
    run = Run("clip")
    for i in range(4):
        run.call(i)
    state = run.step.state_dict()
    kept = copy.deepcopy(state)

    def plain(value):
        if isinstance(value, dict):
            return all(isinstance(key, str) and plain(one) for key, one in value.items())
        if isinstance(value, list):
            return all(map(plain, value))
        return value is None or type(value) in {int, float, bool, str} or (
            type(value) is torch.Tensor and not value.requires_grad
        )

    assert plain(state) and set(state["windows"][0]["open"]["gradients"]) == dict(run.model.named_parameters()).keys()
    run.call(4)
    assert repr(state) == repr(kept)
    again = Run("clip")
    again.step.load_state_dict(state)
    again.call(4)
    run.step.reset()
    again.step.reset()
    assert repr(state) == repr(kept), "loading takes copies"


def test_a_live_function_goes_back():
    """Loading replaces what is open, gradients included, at a boundary and in the middle of a window."""
    run = Run()
    states = []
    for i in range(7):
        states.append(run.save())
        run.call(i)
    expected = run.result()
    for place in (4, 0, 6, 3):
        run.load(states[place])
        assert run.step.progress.micro_steps == place
        assert (run.model[0].weight.grad is None) == (place % 3 == 0)
        for i in range(place, 7):
            run.call(i)
        same(expected, run.result())
    run.step.reset()


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


# -- several windows ------------------------------------------------------------------------------------------------


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
        for a, b in zip(whole[1], again[1]):
            same(a.state_dict(), b.state_dict())
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
    same(one.model.state_dict(), saved.model.state_dict())
    other.train_step.reset()
    for _ in range(20):  # whichever of these gets the id of one that died waiting
        waiting = Trainer()
        assert waiting.train_step.progress.micro_steps == 0
        waiting.train_step.load_state_dict(state)
        del waiting


# -- a state that does not fit --------------------------------------------------------------------------------------


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
    with pytest.raises(GradSyncError, match=re.escape(text) + ".*same models and optimizers"):
        step(large, torch.optim.SGD(large.parameters(), lr=0.1), micro_batch(0, 0))
    assert step.progress.micro_steps == 4
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


def test_other_ranks(ranks):
    """What one process saved does not fit two, nor the other way round."""
    state = after(4)
    state["windows"][0]["num_ranks"] = 2
    run = Run()
    run.step.load_state_dict(state)
    with pytest.raises(GradSyncError, match="as many ranks as it was saved on, 2, but there are 1. Start that many; or, if"):
        run.call(0)
    for said in ranks(2).run(CASES + "a_state_for_other_ranks"):
        assert said.startswith("GradSyncError: A state of") and "saved on, 1, but there are 2" in said


def test_a_scaler_that_was_left_behind():
    """The held gradients are scaled: by another scale they would be wrong, and silently so."""
    run = Run("scaler")
    for i in range(4):
        run.call(i)
    state = run.save()
    run.step.reset()
    again = Run("scaler")
    del state["other 0"]
    for name, one in state.items():
        again.stateful[name].load_state_dict(one)
    again.call(4)
    text = "scaled by 512, and those since then by 256. Save scaler.state_dict() in the same checkpoint, and load both."
    with pytest.raises(GradSyncError, match=re.escape(text)):
        again.call(5)
    assert all(p.grad is None for p in again.model.parameters())


@pytest.mark.parametrize(
    ("state", "text"),
    [({}, "version 1, but what came has version None"), ([1], "what came is of type list"), ({"version": 2}, "version 2")],
)
def test_what_is_no_state(state, text):
    with pytest.raises(ValueError, match=text):
        Run().step.load_state_dict(state)
