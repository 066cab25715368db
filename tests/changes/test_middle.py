"""Edits in the middle of a window, and what reset, exceptions and the state know of an edit before it."""

from __future__ import annotations

from contextlib import contextmanager
from itertools import product

import pytest
import torch
import torch.distributed as dist

import gradsync
from gradsync import GradSyncError, accumulating
from tests.changes import edits
from tests.changes.edits import BY_NAME, HOWS, WRAPS
from tests.changes.rule import Outcome, Run, compare, layer, my_rank, told, world_size
from tests.changes.together import each, hold
from tests.support.reference import micro_batch


def unfreeze(run: Run) -> None:
    run.model.body.requires_grad_(True)


MIDDLE = {
    **{name: BY_NAME[name] for name in ("new_head", "appended_layer", "frozen", "in_float32", "assigned")},
    **{name: BY_NAME[name] for name in ("resized_embedding", "weight_norm", "in_float32_and_back", "other_layout")},
    "unfrozen": unfreeze,
}  # fmt: skip


def edited_in_the_middle(name: str, how: str, wrap: str, at: int) -> Outcome:
    """The window in which the edit falls is refused; what had been held is gone with it."""

    def story(run: Run) -> None:
        if name == "unfrozen":
            edits.frozen(run)
        run.train(1)
        for _ in range(at):
            run.micro()
        MIDDLE[name](run)
        for _ in range(run.steps - at):
            run.micro()
        run.train(1)

    return told(story, how, wrap, 3)


@pytest.mark.parametrize("name", MIDDLE)
def test_an_edit_in_the_middle_of_a_window(ranks, name):
    hold(ranks, 2, edited_in_the_middle, product([name], ["accumulating"], WRAPS, [1, 2]), says="window|middle", only="error")
    hold(ranks, 2, edited_in_the_middle, product([name], ["sync_every"], WRAPS, [1, 2]))


def toggled_between_calls(how: str, wrap: str, steps: int) -> Outcome:
    """Off and on again between two calls of a window: no call sees it."""

    def story(run: Run) -> None:
        for _ in range(3 * steps):
            run.model.body.requires_grad_(False)
            run.model.body.requires_grad_(True)
            run.micro()

    return told(story, how, wrap, steps)


def test_what_no_call_sees_is_no_change(ranks):
    hold(ranks, 2, toggled_between_calls, product(HOWS[::2], WRAPS, [1, 3]), only="exact")


@contextmanager
def no_toggles(mine, other, g_trains: bool):
    yield


@contextmanager
def both(mine, other, g_trains: bool):
    """One is on, the other off."""
    mine.requires_grad_(True)
    other.requires_grad_(False)
    yield


@contextmanager
def d_off_and_on(mine, other, g_trains: bool):
    """D is off while G trains."""
    other.requires_grad_(not g_trains)
    yield
    other.requires_grad_(True)


def gan(wrap: str, toggles, steps: int) -> Outcome:
    """Two functions in turn, each call toggling the halves, as the tutorials do: two windows are open at a time."""
    seen, right = [], []
    for ours in (False, True):
        run = Run("reference", wrap, steps)
        g, d = run.model, layer(2, 1)
        og, od = run.sgd(g), run.sgd(d)

        def d_loss(g, d, x):
            return d(g(x)).square().mean()

        def g_loss(g, d, x):
            return -d(g(x)).mean()

        d_step = accumulating(steps=steps)(lambda g, d, optimizer, x: d_loss(g, d, x))
        g_step = accumulating(steps=steps)(lambda g, d, optimizer, x: g_loss(g, d, x))
        homes = [run._home(g), run._home(d)] if ours else [g, d]
        held = {False: [], True: []}
        for i in range(3 * steps):
            for turn, (mine, other, optimizer) in enumerate([(d, g, od), (g, d, og)]):
                loss = (d_loss, g_loss)[turn]
                with toggles(mine, other, mine is g):
                    if ours:
                        (d_step, g_step)[turn](*homes, optimizer, micro_batch(my_rank(), i))
                        continue
                    parameters = list(mine.parameters())
                    for rank in range(world_size()):
                        total = loss(g, d, micro_batch(rank, i)) / (world_size() * steps)
                        held[bool(turn)].append(torch.autograd.grad(total, parameters))
                    if i % steps == steps - 1:
                        for p, *grads in zip(parameters, *held[bool(turn)]):
                            p.grad = sum(grads)
                        held[bool(turn)].clear()
                        optimizer.step()
                        optimizer.zero_grad()
            if i % steps == steps - 1:
                snapshot = {n: p.detach().clone() for m in (g, d) for n, p in m.named_parameters()}
                (seen if ours else right).append(snapshot)
    compare(seen, right)
    return Outcome("exact")


@pytest.mark.parametrize("size", [1, 2])
def test_a_gan_that_toggles_requires_grad_between_calls(ranks, size):
    """What every GAN loop does: no change of participants, bare or on DDP."""
    hold(ranks, size, gan, product(WRAPS, [no_toggles, both, d_off_and_on], [1, 3]), only="exact")


# -- reset, exceptions and the state see what is there now --------------------------------------------------------


def reset(run: Run) -> None:
    run._step.reset()


def exception(run: Run) -> None:
    loss, run.loss = run.loss, None
    try:
        run.micro()
    except TypeError:
        run.loss = loss


def after_an_edit(name: str, wrap: str, give_up) -> Outcome:
    """Half a window after the edit is given up; nothing of it stays, and the next window is exact."""

    def story(run: Run) -> None:
        run.train(1)
        BY_NAME[name](run)
        run.train(1)
        if run.how != "reference":  # the reference never has the half window
            before = run.drawn
            run.micro()
            give_up(run)
            left = [n for n, p in run.tracked().items() if p.grad is not None]
            assert not left, f"{give_up.__name__} left gradients of {left}"
            run.drawn = before
        run.train(2)

    return told(story, "accumulating", wrap, 3)


AFTER = ["new_head", "appended_layer", "assigned", "frozen_and_back", "weight_norm"]


@pytest.mark.parametrize("give_up", [reset, exception])
def test_reset_and_exceptions_know_the_parameters_of_now(ranks, give_up):
    hold(ranks, 2, after_an_edit, product(AFTER, WRAPS, [give_up]))
    hold(ranks, 1, after_an_edit, product(AFTER[:4], ["bare"], [give_up]), only="exact")


def saved_after_an_edit(name: str, wrap: str) -> Outcome:
    """A mid-window state after the edit is loaded into a run that had no edit: the same numbers."""

    def story(run: Run) -> None:
        run.train(1)
        BY_NAME[name](run)
        run.train(1)
        run.micro()
        if run.how != "reference":
            state = run._step.state_dict()
            run._step.reset()
            run.rewrap()
            run._step = run._function()
            run._step.load_state_dict(state)
        run.micro()
        run.micro()
        run.train(1)

    return told(story, "accumulating", wrap, 3)


def test_the_state_knows_the_parameters_of_now(ranks):
    hold(ranks, 2, saved_after_an_edit, product([*AFTER, "adapter"], WRAPS))
    hold(ranks, 1, saved_after_an_edit, product([*AFTER[:4], "adapter"], ["bare"]), only="exact")


def goes_on_after_the_error(wrap: str) -> list[str]:
    """Where an edit is refused, what the error advises helps: DDP anew, or another function, and everything is exact."""
    run, reference = Run("accumulating", wrap, 2), Run("reference", wrap, 2)
    said = []
    for one in (reference, run):
        one.train(1)
        edits.new_head_and_optimizer(one)
        try:
            one.train(1)
        except GradSyncError as error:
            said.append(str(error))
            one.drawn = 2
            one.rewrap()
            one.train(1)
        one.train(1)
    compare(run.trace, reference.trace)
    dist.barrier()
    return said


def test_after_the_error_what_it_advises_helps(ranks):
    def check(said, *_):
        assert bool(said[0]) == bool(said[1]), said

    each(ranks, 2, goes_on_after_the_error, product(WRAPS), check)


@pytest.mark.parametrize("edit", ["new_head", "assigned"])
def test_an_optimizer_made_anew_beside_the_old_one(edit):
    """In the middle of a window, after an edit: an error that drops the window, also where the old one still lives."""
    run = Run("accumulating", "bare", 3)
    step = accumulating(steps=3)(lambda model, optimizer, x: model(x).square().mean())
    old = run.sgd(run.model)
    step(run.model, old, micro_batch(0, 0))
    BY_NAME[edit](run)
    new = run.sgd(run.model)
    with pytest.raises(GradSyncError, match="made anew, and the models have lost parameters since it was opened. That window is"):
        step(run.model, new, micro_batch(0, 1))
    for i in range(3):
        step(run.model, new, micro_batch(0, i))
    assert step.progress.updates == 1 and old.param_groups
