"""Parameters that some micro-batches, ranks or windows do not use."""

from __future__ import annotations

import contextlib
import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import gradsync
from gradsync import accumulating
from tests.support.compare import assert_equal_updates
from tests.support.models import small_model
from tests.support.recorder import Recorder
from tests.support.reference import cut, mean_loss, micro_batch, train, window_mean


def searched() -> tuple[DDP, Recorder]:
    """A model with an unused parameter on a DDP that looks for those."""
    model = small_model(unused=True)
    return DDP(model, find_unused_parameters=True), Recorder(model.parameters())


def dropped_by_the_user() -> None:
    """A search for unused parameters remembers what held backwards used, also if somebody drops their gradients."""
    ranks, rank = range(dist.get_world_size()), dist.get_rank()
    home, optimizer = searched()

    @accumulating(steps=1)
    def step(model, optimizer, x, fails=False):
        loss = mean_loss(model, x)
        if fails:
            loss.register_hook(lambda _: 1 / 0)
        return loss

    step(home, optimizer, micro_batch(rank, 0))
    for micro, x in zip(gradsync.sync_every(home, 2), [micro_batch(rank, 1)], strict=False):
        micro.backward(mean_loss(home, x))
    optimizer.zero_grad()
    for fails in (True, False):
        with contextlib.suppress(ZeroDivisionError):
            step(home, optimizer, micro_batch(rank, 2), fails=fails)
    with gradsync.no_sync(home):
        mean_loss(home, micro_batch(rank, 3)).backward()
    optimizer.zero_grad()
    step(home, optimizer, micro_batch(rank, 4))
    expected, _ = train(small_model(unused=True), [[(r, i) for r in ranks] for i in (0, 2, 4)], window_mean)
    assert_equal_updates(optimizer.seen, expected)


def dropped_by_a_backward() -> None:
    """The same for a held backward that fails half-way with a type in `skip`, and a tail that then closes."""
    ranks, rank = range(dist.get_world_size()), dist.get_rank()
    home, optimizer = searched()

    @accumulating(steps=2, skip=ZeroDivisionError)
    def step(home, optimizer, number):
        x = micro_batch(rank, number).requires_grad_()
        if number == 0:
            x.register_hook(lambda _: 1 / 0)  # after the last parameter
        return mean_loss(home, x)

    for numbers in ([0], [1, 2]):
        for number in step.over(numbers):
            step(home, optimizer, number)
    expected, _ = train(small_model(unused=True), [[(r, i) for r in ranks for i in (1, 2)]], window_mean)
    assert_equal_updates(optimizer.seen, expected)
    assert step.progress.dropped == step.progress.skipped == 1


@pytest.mark.parametrize("size", [1, 2])
def test_gradients_that_the_user_drops(ranks, size):
    ranks(size).run(dropped_by_the_user)
    ranks(size).run(dropped_by_a_backward)


def backwards_of_the_users_own() -> None:
    """The search takes note of backwards outside of all windows, too; what only these used stays None."""
    ranks, rank = range(dist.get_world_size()), dist.get_rank()
    home, optimizer = searched()
    step = accumulating(steps=1)(mean_step)
    lengths = [3 - r for r in ranks]
    for i in step.over(range(lengths[rank])):
        for parameter in home.parameters():
            parameter.sum().backward()  # the reducer is not armed: its hooks take note, and no more
        optimizer.zero_grad()
        step(home, optimizer, micro_batch(rank, i))
    windows = [[(r, i) for r in ranks if i < lengths[r]] for i in range(max(lengths))]
    expected, _ = train(small_model(unused=True), windows, window_mean)
    assert any(gradient is None for gradient in expected[0])
    assert_equal_updates(optimizer.seen, expected)


def mean_step(home, optimizer, x):
    return mean_loss(home, x)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_backwards_of_the_users_own_between_windows(ranks, size):
    ranks(size).run(backwards_of_the_users_own)


def unused_in_ddp() -> str:
    """What DDP itself would only report at the next forward."""
    model = small_model(unused=True)
    optimizer = Recorder(model.parameters())
    step = accumulating(steps=1)(lambda model, optimizer, x: mean_loss(model, x))
    try:
        step(DDP(model), optimizer, micro_batch(dist.get_rank(), 0))
    except gradsync.GradSyncError as error:
        return str(error)
    return "no error"


def test_a_parameter_that_ddp_finds_unused_is_an_error_on_every_rank(ranks):
    for text in ranks(2).run(unused_in_ddp):
        assert "no micro-batch of the window used unused" in text and "find_unused_parameters=True" in text


def unused_sometimes() -> None:
    """A bare model's parameter that this rank, or this micro-batch, did not use; one that nobody used stays None."""
    rank = dist.get_rank()
    model = nn.ModuleList([nn.Linear(3, 1).double() for _ in range(4)])
    optimizer = Recorder(model.parameters(), lr=0.0)
    uses = {0: {0: [0], 1: [0, 1]}, 1: {0: [0], 1: [2]}}  # rank, micro-batch -> layers; the last is never used

    @accumulating(steps=2)
    def step(model, optimizer, x, layers):
        return sum(mean_loss(model[i], x) for i in layers)

    for _ in range(3):
        for i in range(2):
            step(model, optimizer, micro_batch(rank, i), uses[rank][i])
    twin = copy.deepcopy(model)
    loss = sum(mean_loss(twin[k], micro_batch(r, i)) for r in (0, 1) for i in (0, 1) for k in uses[r][i]) / 4
    expected = torch.autograd.grad(loss, list(twin.parameters()), allow_unused=True)
    assert expected[-1] is None
    assert_equal_updates(optimizer.seen, [list(expected)] * 3)


def test_a_bare_models_parameter_that_not_every_rank_uses(ranks):
    ranks(2).run(unused_sometimes)


def freezing(wrap: str) -> None:
    """Layers frozen and unfrozen between windows synchronise as they are."""
    rank = dist.get_rank()
    model, twin = small_model(), small_model()
    for one in (model, twin):
        one[0].requires_grad_(False)
    home = model if wrap == "bare" else DDP(model)
    optimizer = Recorder(model.parameters(), lr=0.0)
    step = accumulating(steps=2)(lambda model, optimizer, x: mean_loss(model, x))
    for window, trainable in enumerate([False, True, True, False, True]):
        model[0].requires_grad_(trainable)
        for i in range(2):
            step(home, optimizer, micro_batch(rank, 2 * window + i))
    expected, _ = train(small_model(), cut([10, 10], 2), window_mean, lr=0.0)
    for window, trainable in enumerate([False, True, True, False, True]):
        want = expected[window] if trainable else [None, None, *expected[window][2:]]
        assert_equal_updates([optimizer.seen[window]], [want])


@pytest.mark.parametrize("wrap", ["bare", "ddp"])
def test_parameters_frozen_and_unfrozen_during_training(ranks, wrap):
    ranks(2).run(freezing, wrap)
