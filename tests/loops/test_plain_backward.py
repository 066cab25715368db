"""`sync_every` in loops whose backward is the user's: what accumulates into parameters counts, and nothing else."""

from __future__ import annotations

import os
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

import gradsync
from gradsync import GradSyncError, sync_every
from tests.support.models import small_model
from tests.support.reference import cut, mean_loss, micro_batch, train, window_mean
from tests.support.verdicts import (
    ENGINES, NOT_SHARDED, FullRecorder, compare, exact, items_of_rank, on_engine, refused, verdict, verdicts,
)  # fmt: skip

HOMES = [*((one, 2) for one in ENGINES), ("bare", 1), ("ddp", 1), ("bare", 3)]
MAY_STAY_UNUSED = {"bare", "find_unused"}  # engines on which a parameter may


def plain(step, loss):
    (loss / step.size).backward()


def by_step(step, loss):
    step.backward(loss)


BACKWARDS = pytest.mark.parametrize("backward", [plain, by_step])


# -- what else a turn of the loop differentiates --------------------------------------------------------------------


def loss_and_squares(model, x, create_graph: bool):
    """The mean loss, and the squared norm of its gradient at the input and at the parameters."""
    x = x.detach().clone().requires_grad_()
    loss = mean_loss(model, x)
    inside = [x, *model.parameters()]
    grads = torch.autograd.grad(loss, inside, create_graph=create_graph, retain_graph=True, allow_unused=True)
    return loss, sum(grad.square().sum() for grad in grads if grad is not None)


def penalty(model, x):
    loss, squares = loss_and_squares(model, x, create_graph=True)
    return loss + 0.1 * squares


def nothing_else(home, other, x, backward):
    backward(mean_loss(home, x))


def asking_for_gradients(home, other, x, backward):
    backward(loss_and_squares(home, x, create_graph=False)[0])
    loss_and_squares(home, x, create_graph=False)


def a_gradient_penalty(home, other, x, backward):
    backward(penalty(home, x))


def another_models_backward(home, other, x, backward):
    other(x).sum().backward()
    backward(mean_loss(home, x))
    other(x).square().sum().backward()


def a_loss_through_another_model(home, other, x, backward):
    backward(mean_loss(home, x) + 0.0 * other(x).sum())


BODIES = [nothing_else, asking_for_gradients, a_gradient_penalty, another_models_backward, a_loss_through_another_model]


def differentiated(engine: str, body, backward, lengths: list[int], unused: bool = False):
    home, other = on_engine(small_model(unused=unused), engine), small_model()
    optimizer = FullRecorder(home.parameters())
    loss = penalty if body is a_gradient_penalty else mean_loss

    def run():
        for step, x in sync_every(home, 3, items_of_rank(lengths)):
            body(home, other, x, partial(backward, step))
            if step.last:
                optimizer.step()
                optimizer.zero_grad()

        def whole(model, window):
            return sum(loss(model, micro_batch(r, i)) for r, i in window) / len(window)

        compare(optimizer.seen, train(small_model(unused=unused), cut(lengths, 3), whole)[0])

    return verdict(run)


@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize(("engine", "size"), HOMES)
def test_a_plain_backward(ranks, engine, size, body):
    """The loop that somebody has already: sums over the window, averaged over ranks, divided by the user."""
    if engine == "fsdp2" and body in {asking_for_gradients, a_gradient_penalty}:
        pytest.skip("the gradients of sharded parameters are not for torch.autograd.grad")
    exact(verdicts(ranks(size), differentiated, engine, body, plain, [6] * size, engine in MAY_STAY_UNUSED))


@pytest.mark.parametrize("body", BODIES[1:])
@pytest.mark.parametrize(("engine", "size"), [*((one, 2) for one in NOT_SHARDED), ("bare", 1), ("bare", 3)])
def test_the_same_bodies_with_step_backward(ranks, engine, size, body):
    """Uneven ranks too: what else the body differentiates has no part in the window."""
    exact(verdicts(ranks(size), differentiated, engine, body, by_step, [5, 2, 4][:size]))


def second_on_boundary(engine: str):
    home = on_engine(small_model(), engine)

    def run():
        for step, x in sync_every(home, 2, items_of_rank([4] * dist.get_world_size())):
            mean_loss(home, x).backward()
            if step.last:
                mean_loss(home, x).backward()

    return verdict(run)


@pytest.mark.parametrize(("engine", "size"), HOMES)
def test_a_second_plain_backward_on_the_boundary(ranks, engine, size):
    """The first one has synchronised: what the second adds would stay local."""
    refused(verdicts(ranks(size), second_on_boundary, engine), "second|one backward|twice", "add|sum|once")


def own_after(step, loss):
    step.backward(loss())
    loss().backward()


def own_before(step, loss):
    loss().backward()
    step.backward(loss())


def own_where_held(step, loss):
    step.backward(loss()) if step.last else loss().backward()


def own_on_the_last(step, loss):
    loss().backward() if step.last else step.backward(loss())


def one_layer_beside(step, loss):
    step.backward(loss())
    if step.last:
        loss(1).backward()


MIXED = [own_after, own_before, own_where_held, own_on_the_last, one_layer_beside]


def mixed(engine: str, backwards, steps: int):
    home = on_engine(small_model(), engine)
    optimizer = FullRecorder(home.parameters())

    def run():
        for step, x in sync_every(home, steps, items_of_rank([4] * dist.get_world_size())):
            backwards(step, lambda layers=9, x=x: home(x).square().mean() if layers == 9 else some_of(home, x))
            assert not step.last, "the window has closed"
        assert not optimizer.seen

    return verdict(run)


def some_of(home, x):
    """A loss of one layer alone; what is sharded is whole in a forward alone."""
    if isinstance(home, FSDPModule):
        return home(x).sum()
    return getattr(home, "module", home)[0].weight.square().sum() + 0.0 * x.sum()


@pytest.mark.parametrize("backwards", MIXED)
@pytest.mark.parametrize(("engine", "size"), HOMES)
def test_a_plain_backward_beside_step_backward(ranks, engine, size, backwards):
    """It would be scaled by nothing, or stay on its rank: the window is refused before the optimizer's step."""
    for steps in (2,) if backwards in {own_where_held, own_on_the_last} else (2, 1):
        refused(verdicts(ranks(size), mixed, engine, backwards, steps), "plain backward|second", "add|once")


def stepping(engine: str, backward):
    home = on_engine(small_model(), engine)
    optimizer = FullRecorder(home.parameters())

    def run():
        for step, x in sync_every(home, 2, items_of_rank([4] * dist.get_world_size())):
            backward(step, mean_loss(home, x))
            optimizer.step()
            optimizer.zero_grad()

    return verdict(run)


@BACKWARDS
@pytest.mark.parametrize(("engine", "size"), HOMES)
def test_an_update_on_a_held_micro_step(ranks, engine, size, backward):
    """`if step.last:` was forgotten: on FSDP the step would do nothing, elsewhere the replicas would part."""
    refused(verdicts(ranks(size), stepping, engine, backward), "step", "last")


def stepping_another(engine: str):
    """A model outside of the loop is stepped as its user likes."""
    home, other = on_engine(small_model(), engine), small_model()
    optimizer, its = FullRecorder(home.parameters()), torch.optim.SGD(other.parameters(), lr=0.1)
    size = dist.get_world_size()

    def run():
        for step, x in sync_every(home, 2, items_of_rank([4] * size)):
            other(x).square().sum().backward()
            its.step()
            its.zero_grad()
            step.backward(mean_loss(home, x))
            if step.last:
                optimizer.step()
                optimizer.zero_grad()
        compare(optimizer.seen, train(small_model(), cut([4] * size, 2), window_mean)[0])

    return verdict(run)


@pytest.mark.parametrize(("engine", "size"), HOMES)
def test_an_update_of_another_model_on_a_held_micro_step(ranks, engine, size):
    exact(verdicts(ranks(size), stepping_another, engine))


# -- run= -----------------------------------------------------------------------------------------------------------


# Each gives what runs the backward, and what the body calls as its model.


def accelerate(home: nn.Module):
    from accelerate import Accelerator

    names = {"RANK": dist.get_rank(), "LOCAL_RANK": dist.get_rank(), "WORLD_SIZE": dist.get_world_size()}
    names |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 29511}
    before = dict(os.environ)
    os.environ.update({name: str(value) for name, value in names.items()})
    try:
        accelerator = Accelerator(cpu=True)
    finally:
        os.environ.clear()
        os.environ.update(before)
    return accelerator.backward, home


def fabric(home: nn.Module):
    from lightning_fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=1)
    return fabric.backward, fabric.setup(home)


def a_function(home: nn.Module):
    return (lambda loss: loss.backward()), home


def tensor_backward(home: nn.Module):
    return torch.Tensor.backward, home


def twice_the_loss(home: nn.Module):
    return (lambda loss: (2 * loss).backward()), home


def run_by(engine: str, runner, counted: bool):
    lengths = [5, 2, 4][: dist.get_world_size()]
    home = on_engine(small_model(), engine)
    backward, model = runner(home)
    optimizer = FullRecorder(home.parameters())
    factor = 2 if runner is twice_the_loss else 1

    def run():
        for step, x in sync_every(home, 3, items_of_rank(lengths)):
            loss = mean_loss(model, x)
            step.backward(loss * 4, count=4, run=backward) if counted else step.backward(loss, run=backward)
            if step.last:
                optimizer.step()
                optimizer.zero_grad()
        whole = lambda model, window: factor * window_mean(model, window)  # noqa: E731
        compare(optimizer.seen, train(small_model(), cut(lengths, 3), whole)[0])

    return verdict(run)


@pytest.mark.parametrize("counted", [False, True], ids=["means", "counts"])
@pytest.mark.parametrize(
    ("runner", "engine", "size"),
    [
        *((a_function, engine, size) for engine, size in HOMES),
        (tensor_backward, "bare", 2),
        (twice_the_loss, "bare", 2),
        *((runner, engine, 2) for runner in (accelerate, fabric) for engine in ("bare", "ddp")),
        (accelerate, "bare", 1),
        (fabric, "bare", 1),
    ],
)
def test_who_runs_the_backward(ranks, runner, engine, size, counted):
    """`run=` is given the scaled loss, and the window is as exact as with the library's own backward."""
    exact(verdicts(ranks(size), run_by, engine, runner, counted))


def run_nothing(engine: str):
    home = on_engine(small_model(), engine)

    def run():
        for step, x in sync_every(home, 2, items_of_rank([4] * dist.get_world_size())):
            step.backward(mean_loss(home, x), run=lambda loss: None)

    return verdict(run)


@pytest.mark.parametrize(("engine", "size"), [("bare", 1), ("bare", 2), ("ddp", 2)])
def test_a_run_that_runs_no_backward(ranks, engine, size):
    refused(verdicts(ranks(size), run_nothing, engine), "run", "backward")


# -- no_sync --------------------------------------------------------------------------------------------------------


def no_sync_bare():
    model = small_model()

    def run():
        with gradsync.no_sync(model):
            mean_loss(model, micro_batch(dist.get_rank(), 0)).backward()

    return verdict(run)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_no_sync_on_a_bare_model(ranks, size):
    """Nothing would ever synchronise what it holds: an error on several ranks, nothing to do on one."""
    said = verdicts(ranks(size), no_sync_bare)
    exact(said) if size == 1 else refused(said, "ddp", "no_sync")


def windows_of_one_on_fsdp1(backward, both_after: bool = False):
    """FSDP1 puts other storage behind its flat parameters in each forward: nobody may hold their nodes."""
    rank, size = dist.get_rank(), dist.get_world_size()
    home = FullyShardedDataParallel(small_model(), device_id=torch.device("cpu"), use_orig_params=True)
    optimizer, twin = torch.optim.SGD(home.parameters(), lr=0.1), small_model()
    by_hand = torch.optim.SGD(twin.parameters(), lr=0.1)

    def run():
        for step, x in sync_every(home, 1, [micro_batch(rank, i) for i in range(3)]):
            backward(step, mean_loss(home, x))
            optimizer.step()
            optimizer.zero_grad()
            (sum(mean_loss(twin, micro_batch(r, step.window)) for r in range(size)) / size).backward()
            by_hand.step()
            by_hand.zero_grad()
        with FullyShardedDataParallel.summon_full_params(home):
            for mine, right in zip(home.parameters(), twin.parameters()):
                assert torch.allclose(mine, right, atol=1e-12)
        if both_after:
            for step, x in sync_every(home, 1, [micro_batch(rank, 0)]):
                by_step(step, mean_loss(home, x))
                plain(step, mean_loss(home, x))

    return verdict(run)


def test_windows_of_one_micro_batch_on_fsdp1(ranks):
    for backward in (plain, by_step):
        exact(verdicts(ranks(2), windows_of_one_on_fsdp1, backward))
    refused(verdicts(ranks(2), windows_of_one_on_fsdp1, by_step, True), "plain backward", "once")


def run_by_one_that_divides():
    """Accelerate divides by its own number of steps; what the error says of it."""
    backward, home = accelerate(small_model())
    accelerator = backward.__self__
    accelerator.gradient_accumulation_steps = 2
    try:
        for step, x in sync_every(home, 2, items_of_rank([2] * dist.get_world_size())):
            step.backward(mean_loss(home, x), run=backward)
    except GradSyncError as error:
        return str(error)
    finally:
        accelerator.gradient_accumulation_steps = 1  # of all Accelerators: it is kept in one place
    return "no error"


def test_what_divides_by_itself_may_not_run_the_backward(ranks):
    for said in ranks(2).run(run_by_one_that_divides):
        assert "divides it by its gradient_accumulation_steps, which are 2" in said


def cleared_on_fsdp1(backward, before: bool, original: bool):
    """Gradients are cleared before a window, or made zeros after it."""
    rank, size = dist.get_rank(), dist.get_world_size()
    home = FullyShardedDataParallel(small_model(), device_id=torch.device("cpu"), use_orig_params=original)
    optimizer = torch.optim.SGD(home.parameters(), lr=0.1)

    def run():
        for step, x in sync_every(home, 2, [micro_batch(rank, i) for i in range(6)]):
            if before and not step.index:
                optimizer.zero_grad()
            backward(step, mean_loss(home, x))
            if step.last:
                optimizer.step()
                if not before:
                    optimizer.zero_grad(set_to_none=False)
        twin = train(small_model(), cut([6] * size, 2), window_mean)[1]
        with FullyShardedDataParallel.summon_full_params(home):
            mine = torch.cat([parameter.flatten() for parameter in home.parameters()])
        right = torch.cat([parameter.flatten() for parameter in twin.parameters()])
        assert torch.allclose(mine[: right.numel()], right, atol=1e-12)

    return verdict(run)


@pytest.mark.parametrize("original", [True, False])
@pytest.mark.parametrize("before", [True, False], ids=["before", "zeros after"])
@BACKWARDS
def test_gradients_of_fsdp1_are_cleared_as_one_likes(ranks, backward, before, original):
    exact(verdicts(ranks(2), cleared_on_fsdp1, backward, before, original))
