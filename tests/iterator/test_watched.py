"""`sync_every` with `step.backward`: backwards beside it, changed and forgotten gradients are errors in any window."""

from __future__ import annotations

import contextlib

import pytest
import torch
import torch.distributed as dist
from torch import nn

from gradsync import GradSyncError, sync_every
from tests.support.homes import home_of
from tests.support.models import net, small_model
from tests.support.reference import cut, mean_loss, micro_batch, train, window_mean
from tests.support.verdicts import FullRecorder, compare, exact, on_engine, refused, verdict, verdicts

STEPS, WINDOWS = 3, 5
HOMES = [("bare", 1), ("bare", 2), ("ddp", 2), ("find_unused", 2), ("views", 2), ("fsdp2", 2)]


class Loop:
    """Its body has a habit, before its backward or after it, in some turns."""

    def __init__(self, home: nn.Module) -> None:
        self.home = home
        self.optimizer = FullRecorder(home.parameters())

    def run(self, before=None, after=None, at=lambda step: True, update=None) -> None:
        rank = dist.get_rank() if dist.is_initialized() else 0
        for step, x in sync_every(self.home, STEPS, [micro_batch(rank, i) for i in range(STEPS * WINDOWS)]):
            if before is not None and at(step):
                before(self)
            step.backward(mean_loss(self.home, x))
            if after is not None and at(step):
                after(self)
            if step.last:
                (update or update_and_clear)(self)


def update_and_clear(loop: Loop) -> None:
    loop.optimizer.step()
    loop.optimizer.zero_grad()


def update_only(loop: Loop) -> None:
    loop.optimizer.step()


def fill_with_zeros(loop: Loop) -> None:
    loop.optimizer.step()
    loop.optimizer.zero_grad(set_to_none=False)


def write_zeros(loop: Loop) -> None:
    loop.optimizer.step()
    for parameter in loop.home.parameters():
        parameter.grad.data.zero_()


def clear(loop: Loop) -> None:
    loop.optimizer.zero_grad()


def clip(loop: Loop) -> None:
    nn.utils.clip_grad_norm_(loop.home.parameters(), 1e-3)


def halve_and_double(loop: Loop) -> None:
    for factor in (0.5, 2.0):
        for parameter in loop.home.parameters():
            parameter.grad.mul_(factor)


def penalty(loop: Loop) -> None:
    sum(parameter.square().sum() for parameter in loop.home.parameters()).backward()


def penalty_of_the_last_layer(loop: Loop) -> None:
    sum(parameter.square().sum() for parameter in list(loop.home.parameters())[-1:]).backward()


def penalty_of_a_layer_between(loop: Loop) -> None:
    sum(parameter.square().sum() for parameter in list(loop.home.parameters())[2:3]).backward()


def penalty_of_the_first_layer(loop: Loop) -> None:
    sum(parameter.square().sum() for parameter in list(loop.home.parameters())[:1]).backward()


def another_loss(loop: Loop) -> None:
    mean_loss(loop.home, micro_batch(0, 99)).backward()


class At:
    """In which turns; None: in each."""

    def __init__(self, window: int | None = None, index: int | None = None) -> None:
        self.window, self.index = window, index

    def __call__(self, step) -> bool:
        return self.window in {None, step.window} and self.index in {None, step.index}

    def __repr__(self) -> str:
        return f"window {self.window}, micro-step {self.index}"


def habit(engine: str, how: dict):
    size = dist.get_world_size()
    loop = Loop(on_engine(small_model(unused=False), engine))

    def run() -> None:
        loop.run(**how)
        compare(loop.optimizer.seen, train(small_model(unused=False), cut([STEPS * WINDOWS] * size, STEPS), window_mean)[0])

    return verdict(run)


BESIDE = "a plain backward of the same model came beside it|must be left alone until step.backward, but before that of"
PLACES = [At(0, 1), At(0, 2), At(3, 0), At(3, 1), At(3, 2)]


@pytest.mark.parametrize("at", PLACES, ids=repr)
@pytest.mark.parametrize("order", ["before", "after"])
@pytest.mark.parametrize(
    "what",
    [another_loss, penalty, penalty_of_the_first_layer, penalty_of_a_layer_between, penalty_of_the_last_layer],
    ids=lambda one: one.__name__,
)
@pytest.mark.parametrize(("engine", "size"), HOMES)
def test_a_backward_beside_that_of_the_step(ranks, engine, size, what, order, at):
    refused(verdicts(ranks(size), habit, engine, {order: what, "at": at}), BESIDE)


def another_loss_that_is_caught(loop: Loop) -> None:
    with contextlib.suppress(GradSyncError):
        another_loss(loop)


@pytest.mark.parametrize("at", PLACES, ids=repr)
@pytest.mark.parametrize(("engine", "size"), HOMES)
def test_a_backward_beside_it_whose_error_the_body_catches(ranks, engine, size, at):
    said = verdicts(ranks(size), habit, engine, {"after": another_loss_that_is_caught, "at": at})
    refused(said, "a plain backward of the same model came beside it")


def traces(engine: str) -> list:
    """What is left at the parameters after a loop: tables of hooks that autograd would look at in each backward."""
    loop = Loop(on_engine(small_model(unused=False), engine))
    loop.run()
    return [parameter._post_accumulate_grad_hooks for parameter in loop.home.parameters()]


@pytest.mark.parametrize(("engine", "size"), [one for one in HOMES if one[0] != "fsdp2"])
def test_no_hooks_are_left_at_the_parameters(ranks, engine, size):
    assert all(left == [None] * len(left) for left in ranks(size).run(traces, engine))


@pytest.mark.parametrize(("what", "word"), [(clear, "they vanished: something called zero_grad()"),
                                            (clip, "they changed"), (halve_and_double, "they changed")])  # fmt: skip
@pytest.mark.parametrize("at", [At(0, 1), At(3, 1)], ids=repr)
@pytest.mark.parametrize(("engine", "size"), [one for one in HOMES if one[0] != "fsdp2"])
def test_held_gradients_that_the_body_changes(ranks, engine, size, what, word, at):
    refused(verdicts(ranks(size), habit, engine, {"after": what, "at": at}), "must be left alone until step.backward", word)


@pytest.mark.parametrize(("engine", "size"), HOMES)
def test_a_zero_grad_that_was_forgotten(ranks, engine, size):
    refused(verdicts(ranks(size), habit, engine, {"update": update_only}), "still have those of an update", "zero_grad")


def begun_with_gradients(engine: str):
    """A backward of one's own comes before the loop; where they are zeros by then, they are none."""
    loop = Loop(on_engine(small_model(unused=False), engine))

    def run() -> None:
        for write in (fill_with_zeros, lambda loop: None):
            another_loss(loop)
            write(loop)
            loop.run()

    return verdict(run)


@pytest.mark.parametrize(("engine", "size"), HOMES)
def test_a_loop_that_begins_with_gradients(ranks, engine, size):
    refused(verdicts(ranks(size), begun_with_gradients, engine), "must begin without gradients", "a backward of your own")


def two_tasks(engine: str):
    """Two loops of full windows, one after another, and then one step on both means."""
    rank, home = dist.get_rank(), on_engine(small_model(unused=False), engine)
    optimizer = FullRecorder(home.parameters())
    windows = [[(r, i + 10 * task) for r in range(2) for i in range(STEPS)] for task in range(2)]

    def run() -> None:
        for task in range(2):
            for step, i in sync_every(home, STEPS, range(10 * task, 10 * task + STEPS)):
                step.backward(mean_loss(home, micro_batch(rank, i)))
        optimizer.step()
        twin = small_model(unused=False)
        for window in windows:
            window_mean(twin, window).backward()
        compare(optimizer.seen, [[parameter.grad for parameter in twin.parameters()]])

    return verdict(run)


@pytest.mark.parametrize("engine", ["bare", "ddp", "fsdp2"])
def test_a_loop_adds_to_what_another_has_ended_with(ranks, engine):
    exact(verdicts(ranks(2), two_tasks, engine))


def step_early(loop: Loop) -> None:
    loop.optimizer.step()
    loop.optimizer.zero_grad()


@pytest.mark.parametrize("at", [At(1, 1), At(1, 2)], ids=repr)
@pytest.mark.parametrize(("engine", "size"), HOMES)
def test_a_step_before_the_backward_of_the_last_micro_step(ranks, engine, size, at):
    said = verdicts(ranks(size), habit, engine, {"before": step_early, "at": at, "update": clear})
    refused(said, "behind its backward, where the gradients are synchronised", "before the backward of the last one|held")


def two_rates(engine: str, lengths: list[int], counts: bool):
    """One model steps after each window, the other one at the end: it keeps its gradients over windows."""
    rank, homes = dist.get_rank(), [on_engine(small_model(unused=False), engine) for _ in range(2)]
    first, second = (FullRecorder(home.parameters()) for home in homes)

    def run() -> None:
        for step, x in sync_every(homes, STEPS, [micro_batch(rank, i) for i in range(lengths[rank])]):
            loss = sum(mean_loss(home, x) for home in homes)
            step.backward(3 * loss if counts else loss, count=3 if counts else None)
            if step.last:
                update_and_clear(type("One", (), {"optimizer": first}))
        second.step()
        twin = small_model(unused=False)
        for window in cut(lengths, STEPS):
            window_mean(twin, window).backward()
        compare(second.seen, [[parameter.grad for parameter in twin.parameters()]])

    return verdict(run)


@pytest.mark.parametrize(("lengths", "counts"), [([6, 6], False), ([5, 5], False), ([6, 4], False), ([6, 6], True)])
@pytest.mark.parametrize("engine", ["bare", "ddp", "fsdp2"])
def test_a_model_that_steps_after_several_windows(ranks, engine, lengths, counts):
    """Exact in full windows. A factor of the last window would also multiply what is there from the first: an error."""
    said = verdicts(ranks(2), two_rates, engine, lengths, counts)
    exact(said) if lengths == [6, 6] and not counts else refused(said, "must begin without gradients", "a sync_every of their own")


def make_zeros(loop: Loop) -> None:
    for parameter in loop.home.parameters():
        parameter.grad = torch.zeros_like(parameter)


@pytest.mark.parametrize("engine", ["bare", "ddp"])
def test_zeros_are_no_gradients(ranks, engine):
    exact(verdicts(ranks(2), habit, engine, {"before": make_zeros, "at": At(None, 0)}))


@pytest.mark.parametrize("how", [{}, {"before": clear, "at": At(None, 0), "update": update_only},
                                 {"update": fill_with_zeros}, {"update": write_zeros}], ids=["behind it", "before", "zeros", "data"])  # fmt: skip
@pytest.mark.parametrize(("engine", "size"), HOMES)
def test_every_way_to_clear_gradients(ranks, engine, size, how):
    exact(verdicts(ranks(size), habit, engine, how))


def no_backward(loop: Loop) -> None:
    loss = mean_loss(loop.home, micro_batch(0, 99))
    torch.autograd.grad(loss, list(loop.home.parameters()))
    mean_loss(small_model(), micro_batch(0, 99)).backward()


@pytest.mark.parametrize("order", ["before", "after"])
@pytest.mark.parametrize("engine", ["bare", "ddp", "views"])
def test_what_is_no_backward_of_the_model(ranks, engine, order):
    exact(verdicts(ranks(2), habit, engine, {order: no_backward}))


@pytest.mark.parametrize("engine", ["bare", "ddp", "views"])
def test_what_the_body_does_on_the_last_micro_step(ranks, engine):
    exact(verdicts(ranks(2), habit, engine, {"after": halve_and_double, "at": At(None, 2)}))


def swap_halves(model: nn.Module, window: int) -> None:
    """Freeze one half of the model, and train the other."""
    for half, trained in ((model.first, window % 2 == 0), (model.second, window % 2 == 1)):
        for parameter in half.parameters():
            parameter.requires_grad_(trained)


def halves_in_turn(engine: str, explicit: bool, steps: int) -> None:
    home, twin = home_of(engine), net()
    for model in (home.net, twin):
        swap_halves(model, 0)
        model.scale.requires_grad_(False)
    optimizer = torch.optim.SGD(home.model.parameters(), lr=0.1)
    for step, i in sync_every(home.model, steps, range(4 * steps)):
        loss = mean_loss(home.model, micro_batch(home.rank, i, width=4))
        step.backward(loss) if explicit else (loss / steps).backward()
        if step.last:
            optimizer.step()
            optimizer.zero_grad()
            swap_halves(home.net, step.window + 1)
    for window, places in enumerate(cut([4 * steps] * home.size, steps)):
        swap_halves(twin, window)
        trained = [parameter for parameter in twin.parameters() if parameter.requires_grad]
        loss = sum(mean_loss(twin, micro_batch(*place, width=4)) for place in places) / len(places)
        with torch.no_grad():
            for parameter, gradient in zip(trained, torch.autograd.grad(loss, trained), strict=True):
                parameter.sub_(0.1 * gradient)
    for name, parameter in home.full().items():
        torch.testing.assert_close(parameter, dict(twin.named_parameters())[name].detach())


@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize("explicit", [True, False])
@pytest.mark.parametrize("engine", ["bare", "ddp", "fsdp1_full_orig", "fsdp2"])
def test_halves_that_are_frozen_in_turn(ranks, engine, explicit, steps):
    """Sharded engines look at what is frozen in their forwards only, and hooks are set before."""
    ranks(2).run(halves_in_turn, engine, explicit, steps)


def beside_when_thawed(engine: str):
    """A layer is trained from the second window on, and a backward comes beside in its first micro-step."""
    home = home_of(engine)
    for parameter in home.net.second.parameters():
        parameter.requires_grad_(False)

    def run() -> None:
        for step, i in sync_every(home.model, 2, range(6)):
            step.backward(mean_loss(home.model, micro_batch(home.rank, i, width=4)))
            if i == 2:
                mean_loss(home.model, micro_batch(home.rank, i, width=4)).backward()
            if step.last:
                home.model.zero_grad()
                for name, parameter in home.net.named_parameters():
                    parameter.requires_grad_("second" in name)

    return verdict(run)


@pytest.mark.parametrize("engine", ["bare", "ddp", "fsdp1_full_orig", "fsdp2", "fsdp2_gathered"])
def test_a_backward_beside_it_through_what_has_just_been_thawed(ranks, engine):
    refused(verdicts(ranks(2), beside_when_thawed, engine), "a plain backward of the same model came beside it")
