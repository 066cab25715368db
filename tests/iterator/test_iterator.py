"""`sync_every` on DDP: endless, left early, and with nothing to count."""

from __future__ import annotations

import contextlib

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import gradsync
from tests.support.compare import assert_equal_updates
from tests.support.models import small_model
from tests.support.recorder import Recorder
from tests.support.reference import cut, mean_loss, micro_batch, sum_loss, train, window_mean
from tests.support.verdicts import FullRecorder, on_engine
from tests.support.wire import num_collectives


def endless_sync_every() -> None:
    """Zipped with a loop, several models."""
    rank = dist.get_rank()
    one, two = small_model(), small_model()
    homes = DDP(one), two
    optimizer = Recorder([*one.parameters(), *two.parameters()])
    data = [micro_batch(rank, i) for i in range(6)]
    for micro, x in zip(gradsync.sync_every(homes, 3), data):
        micro.backward(mean_loss(homes[0], x) + mean_loss(homes[1], x))
        if micro.last:
            optimizer.step()
            optimizer.zero_grad()
    assert homes[0].require_backward_grad_sync
    expected, _ = train(small_model(), cut([6, 6], 3), window_mean)
    assert_equal_updates(optimizer.seen, [e + e for e in expected])


def endless_plain_backward() -> None:
    """The loop that somebody has already: sums over the window, averaged over ranks."""
    rank = dist.get_rank()
    for static_graph in (False, True):
        model = small_model()
        home = DDP(model, static_graph=static_graph)
        optimizer = Recorder(model.parameters())
        for micro, i in zip(gradsync.sync_every(home, 3), range(6)):
            (mean_loss(home, micro_batch(rank, i)) / micro.size).backward()
            if micro.last:
                optimizer.step()
                optimizer.zero_grad()
        assert_equal_updates(optimizer.seen, train(small_model(), cut([6, 6], 3), window_mean)[0])


@pytest.mark.parametrize("case", [endless_sync_every, endless_plain_backward])
def test_endless(ranks, case):
    ranks(2).run(case)


def leaving_sync_every(how: str) -> None:
    """A break, an exception or a return out of the loop leaves the engine as it was found."""
    home = DDP(small_model())
    data = [micro_batch(dist.get_rank(), i) for i in range(8)]

    def loop():
        for micro, x in gradsync.sync_every(home, 4, data):
            micro.backward(mean_loss(home, x))
            if micro.index == 1:
                if how == "break":
                    break
                if how == "return":
                    return
                raise ZeroDivisionError

    with contextlib.suppress(ZeroDivisionError):
        loop()
    assert home.require_backward_grad_sync and home.require_forward_param_sync
    home.zero_grad()
    before = num_collectives()
    mean_loss(home, data[0]).backward()
    assert num_collectives() > before, "DDP synchronises as before"


@pytest.mark.parametrize("how", ["break", "return", "exception"])
def test_leaving_sync_every(ranks, how):
    ranks(2).run(leaving_sync_every, how)


def test_a_micro_step_shows_its_place():
    step = next(gradsync.sync_every(small_model(), 2))
    assert repr(step) == "MicroStep(index=0, window=0, size=2, last=False, replay=False)"


def test_counts_of_zero_in_sync_every_leave_no_gradient():
    model = small_model()
    for step, x in gradsync.sync_every(model, 2, [micro_batch(0, i) for i in range(2)]):
        step.backward(sum_loss(model, x) * 0, count=0)
    assert all(p.grad is None for p in model.parameters())


def synchronised_by_hand(engine: str, explicit: bool, before: bool) -> None:
    """A body that also calls `sync_gradients`, as the loop by hand did: before the last backward, or behind it."""
    home = on_engine(small_model(unused=False), engine)
    optimizer = FullRecorder(home.parameters())
    for step, i in gradsync.sync_every(home, 3, range(9)):
        if before and step.last:
            gradsync.sync_gradients(home)
        loss = mean_loss(home, micro_batch(dist.get_rank(), i))
        step.backward(loss) if explicit else (loss / step.size).backward()
        if step.last:
            if not before:
                gradsync.sync_gradients(home)
            optimizer.step()
            optimizer.zero_grad()
    assert_equal_updates(optimizer.seen, train(small_model(unused=False), cut([9, 9], 3), window_mean)[0])


@pytest.mark.parametrize(("explicit", "before"), [(False, False), (False, True), (True, False)])
@pytest.mark.parametrize("engine", ["bare", "ddp", "find_unused", "views"])
def test_gradients_that_the_body_synchronises_too(ranks, engine, explicit, before):
    """What is synchronised already stays as it is. Its collectives are no backward of the user's."""
    ranks(2).run(synchronised_by_hand, engine, explicit, before)


@pytest.mark.parametrize("explicit", [True, False])
@pytest.mark.parametrize("steps", [1, 2])
def test_lazy_layers_on_one_rank(steps, explicit):
    """Their first forward is in the loop, as without gradsync."""
    model, twin = (nn.Sequential(nn.LazyLinear(5), nn.Tanh(), nn.LazyLinear(2)).double() for _ in range(2))
    torch.manual_seed(5)
    twin(micro_batch(0, 0))
    torch.manual_seed(5)
    optimizer = FullRecorder(model.parameters())
    for step, i in gradsync.sync_every(model, steps, range(4)):
        loss = mean_loss(model, micro_batch(0, i))
        step.backward(loss) if explicit else (loss / step.size).backward()
        if step.last:
            optimizer.step()
            optimizer.zero_grad()
    assert_equal_updates(optimizer.seen, train(twin, cut([4], steps), window_mean)[0])
