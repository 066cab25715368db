"""A backward of the user's own that fails at the boundary."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

import gradsync
from gradsync import GradSyncError
from tests.support.compare import assert_equal_updates
from tests.support.models import small_model
from tests.support.recorder import Recorder
from tests.support.reference import micro_batch
from tests.support.traps import Trap


def failing_plain_backward(where: int, fails: list, sized: bool) -> None:
    """The same in a `loss.backward()` of the user's own, once it has reached a parameter."""
    rank = dist.get_rank()
    for wrap in (lambda m: m, DDP):
        model = small_model()
        home = wrap(model)
        optimizer = Recorder(model.parameters(), lr=0.0)
        for attempt in range(4):
            items = [micro_batch(rank, i) for i in range(2)]
            try:
                for micro, x in gradsync.sync_every(home, 2, items if sized else iter(items)):
                    armed = rank == 1 and attempt in fails and micro.last
                    y = model[0](Trap.apply(x.requires_grad_(), ZeroDivisionError() if armed and where == 2 else None))
                    y = model[2](model[1](Trap.apply(y, ZeroDivisionError() if armed and where == 0 else None)))
                    (y.square().mean() / 2).backward()
                    if micro.last:
                        optimizer.step()
            except ZeroDivisionError:
                pass
            optimizer.zero_grad()
        twin = small_model()
        loss = sum(twin(micro_batch(r, i)).square().mean() for r in range(2) for i in range(2)) / 4
        expected = [list(torch.autograd.grad(loss, list(twin.parameters())))]
        assert_equal_updates(optimizer.seen[-2:], expected * 2)


@pytest.mark.parametrize("where", [0, 2])
@pytest.mark.parametrize("fails", [[0], [1], [0, 1]])
def test_a_boundary_of_the_users_own_that_fails(ranks, where, fails):
    for sized in (True, False):
        ranks(2).run(failing_plain_backward, where, fails, sized)


def caught(wrap: str, how: str, fails: list, at: int) -> None:
    """A backward that fails in a held micro-step, in a body that catches that and goes on."""
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    model = small_model()
    home = DDP(model) if wrap == "ddp" and size > 1 else model

    def loss_of(x, error):
        y = home(Trap.apply(x.requires_grad_(), error if at else None))
        return Trap.apply(y, None if at else error).square().mean()

    fitted = gradsync.functional.fit(loss_of)
    seen = []
    for step, index in gradsync.sync_every(home, 3, range(7)):
        x, error = micro_batch(rank, index), ZeroDivisionError() if (rank, index) in fails else None
        try:
            fitted(step, x, error) if how == "fit" else step.backward(loss_of(x, error))
        except ZeroDivisionError:
            continue
        if step.last:
            seen.append([p.grad.clone() for p in model.parameters()])
            model.zero_grad()
    windows = [[], [], []]
    for r in range(size):
        mine = [[]]
        for index in range(7):
            mine[-1].append((r, index))
            if (r, index) in fails:
                mine[-1].clear()
            elif len(mine[-1]) == 3:
                mine.append([])
        for window, came in zip(windows, mine):
            window += came
    expected = []
    for window in filter(None, windows):
        twin = small_model()
        loss = sum(twin(micro_batch(r, i)).square().mean() for r, i in window) / len(window)
        expected.append(list(torch.autograd.grad(loss, list(twin.parameters()))))
    assert_equal_updates(seen, expected)


@pytest.mark.parametrize("at", [0, 2])
@pytest.mark.parametrize("how", ["backward", "fit"])
@pytest.mark.parametrize("size", [1, 2])
def test_a_held_backward_that_fails_in_a_body_that_goes_on(ranks, size, how, at):
    for fails in ([(0, 0)], [(0, 1)], [(0, 4), (1, 1)], [(0, 1), (1, 1)]):
        for wrap in ("bare", "ddp"):
            if size == 1:
                caught(wrap, how, fails, at)
            else:
                ranks(size).run(caught, wrap, how, fails, at)


@pytest.mark.parametrize("sized", [True, False])
def test_a_boundary_that_fails_in_a_body_that_goes_on(sized):
    model = small_model()
    items = [micro_batch(0, i) for i in range(4)]
    loop = gradsync.sync_every(model, 2, items) if sized else zip(gradsync.sync_every(model, 2), items)
    with pytest.raises(GradSyncError, match="in window 0 its backward failed, and the loop's body caught the exception"):
        for step, x in loop:
            try:
                y = model(Trap.apply(x.requires_grad_(), ZeroDivisionError() if step.last else None))
                step.backward(y.square().mean())
            except ZeroDivisionError:
                continue
    assert all(parameter.grad is None for parameter in model.parameters())
