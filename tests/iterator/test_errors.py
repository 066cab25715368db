"""Misuse of `sync_every`, and what is told."""

from __future__ import annotations

import pytest
import torch
import torch._dynamo.compiled_autograd
import torch.distributed as dist
from torch import nn

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
    with pytest.raises(GradSyncError, match="ran one out of turn. Call its backward before the loop draws"):
        for step, x in gradsync.sync_every(model, 2, [X, X]):
            steps.append(step)
            steps[0].backward(mean_loss(model, x))


@pytest.mark.parametrize("explicit", [True, False])
@pytest.mark.parametrize("at", [0, 1])
def test_a_backward_behind_a_loop_that_was_left(at, explicit):
    model = small_model()
    for step, x in gradsync.sync_every(model, 2, [X, X, X]):
        if step.index == at:
            break
        step.backward(mean_loss(model, x)) if explicit else mean_loss(model, x).backward()
    with pytest.raises(GradSyncError, match=f"micro-step {at} of window 0 ran one out of turn. .* or is left"):
        step.backward(mean_loss(model, X))


def test_a_step_that_has_closed_an_empty_window_goes_on_to_say_so():
    """Also when the loop has gone on, to windows that are not empty."""
    model, steps = small_model(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step, count in gradsync.sync_every(model, 1, [0, 2, 0]):
        step.backward(mean_loss(model, X) * count, count=count)
        steps.append(step)
        optimizer.step()
        optimizer.zero_grad()
    assert [step.empty for step in steps] == [True, False, True]


@pytest.mark.parametrize("explicit", [True, False])
def test_a_boundary_without_a_backward(explicit):
    model = small_model()
    with pytest.raises(GradSyncError, match="must run a backward, which synchronises the window, but the last one of window 0"):
        for step, x in gradsync.sync_every(model, 2, [X, X, X]):
            if not step.last:
                step.backward(mean_loss(model, x)) if explicit else mean_loss(model, x).backward()


def a_turn_without_a_backward() -> str:
    model = small_model()
    with pytest.raises(GradSyncError) as caught:
        for step in gradsync.sync_every(model, 2):
            if step.last:
                step.backward(mean_loss(model, X))
    return str(caught.value)


def test_without_an_iterable_each_turn_needs_a_backward_on_several_ranks(ranks):
    """No table is sent there: the other ranks would divide by the backward that did not come."""
    for text in ranks(2).run(a_turn_without_a_backward):
        assert "must run 2 backwards in a window of sync_every" in text and "there were 1 in this one" in text, text


@pytest.mark.parametrize("call", [lambda: gradsync.no_sync("x"), lambda: gradsync.sync_gradients(3),
                                  lambda: gradsync.sync_every(None, 2), lambda: gradsync.no_sync()])
def test_what_is_no_module(call):
    with pytest.raises(TypeError, match="needs modules, but one argument is a |needs at least one module"):
        call()


def step_of_a_temperature(lengths: list[int]) -> int:
    """The optimizer steps a parameter that is in no model; how many updates were made, by then."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    model, temperature = small_model(), nn.Parameter(torch.ones((), dtype=torch.float64))
    optimizer = torch.optim.SGD([*model.parameters(), temperature], lr=0.1)
    updates = 0
    try:
        for step, i in gradsync.sync_every(model, 2, range(lengths[rank])):
            step.backward(mean_loss(model, micro_batch(rank, i)) * temperature)
            if step.last:
                optimizer.step()
                optimizer.zero_grad()
                updates += 1
    except GradSyncError as error:
        assert "it steps 1 others that have a gradient, of shape []. Pass all models" in str(error)
        return updates
    return -1


def test_a_step_of_what_is_not_in_the_models(ranks):
    """Its gradient is this rank's own: an error on every rank. On one, only where it lacks a factor: in a tail."""
    assert ranks(2).run(step_of_a_temperature, [4, 4]) == [0, 0]
    assert ranks(2).run(step_of_a_temperature, [4, 2]) == [0, 0]
    assert step_of_a_temperature([4]) == -1
    assert step_of_a_temperature([5]) == 2


def two_loops_and_one_optimizer() -> None:
    """Each loop synchronises its own model, and one optimizer steps both."""
    rank, models, twins = dist.get_rank(), [small_model(), small_model(unused=False)], [small_model(), small_model(unused=False)]
    one, other = (torch.optim.SGD([p for m in those for p in m.parameters()], lr=0.1) for those in (models, twins))
    loops = (gradsync.sync_every(model, 2, range(4)) for model in models)
    for (first, i), (second, _) in zip(*loops, strict=True):
        for step, model in ((first, models[0]), (second, models[1])):
            step.backward(mean_loss(model, micro_batch(rank, i)))
        if first.last:
            one.step()
            one.zero_grad()
    for start in (0, 2):
        places = [(r, i) for r in (0, 1) for i in (start, start + 1)]
        (sum(mean_loss(model, micro_batch(*place)) for model in twins for place in places) / 4).backward()
        other.step()
        other.zero_grad()
    torch.testing.assert_close([*map(list, map(nn.Module.parameters, models))], [*map(list, map(nn.Module.parameters, twins))])


def test_an_optimizer_of_two_loops(ranks):
    ranks(2).run(two_loops_and_one_optimizer)


def named_together() -> None:
    rank = dist.get_rank()
    model, temperature = small_model(), nn.ParameterList([nn.Parameter(torch.ones((), dtype=torch.float64))])
    optimizer = torch.optim.SGD([*model.parameters(), *temperature], lr=0.1)
    for step, i in gradsync.sync_every([model, temperature], 2, range(3 - rank)):
        step.backward(mean_loss(model, micro_batch(rank, i)) * temperature[0])
        if step.last:
            optimizer.step()
            optimizer.zero_grad()
    twin, other = small_model(), nn.Parameter(torch.ones((), dtype=torch.float64))
    optimizer = torch.optim.SGD([*twin.parameters(), other], lr=0.1)
    for window in ([(0, 0), (0, 1), (1, 0), (1, 1)], [(0, 2)]):
        (sum(mean_loss(twin, micro_batch(*place)) * other for place in window) / len(window)).backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.testing.assert_close([*model.parameters(), *temperature], [*twin.parameters(), other])


def test_what_the_error_says_to_do(ranks):
    ranks(2).run(named_together)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch's own reading
@pytest.mark.parametrize("plain", [True, False], ids=["plain", "step.backward"])
def test_compiled_autograd(plain):
    """torch drops the callback by which a plain backward tells that it ends. step.backward needs none."""
    model, twin = small_model(), small_model()
    optimizer, other = (torch.optim.SGD(one.parameters(), lr=0.1) for one in (model, twin))

    def loop() -> None:
        for step, x in gradsync.sync_every(model, 2, [X, X]):
            with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")):
                loss = mean_loss(model, x)
                loss.backward() if plain else step.backward(loss)
            if step.last:
                optimizer.step()
                optimizer.zero_grad()

    if plain:
        with pytest.raises(GradSyncError, match="must tell when it ends, .* Call step.backward"):
            loop()
        return
    loop()
    mean_loss(twin, X).backward()
    other.step()
    torch.testing.assert_close([*model.parameters()], [*twin.parameters()])
