"""Loops of `sync_every` with `functional.fit`, whose ranks lack memory, against float64 by hand."""

import torch
import torch.distributed as dist

import gradsync
from gradsync.parts import halving
from tests.parts.cases_decorator import LR, ROWS, WINDOW, Fails, compare, on, regular, tried_whole, truth
from tests.parts.limited import Net, batch, mean_loss, sum_loss


def looped(kind, where, limits, at, function=mean_loss, num=2 * WINDOW, fails=None):
    """Parameters after each update, and how the last call ran."""
    halving.free = lambda: None  # a collection for each failure would take most of the time
    rank = dist.get_rank() if dist.is_initialized() else 0
    model = Net(at=at)
    model.limit, model.where = limits[rank % len(limits)], where
    used = on(kind, model)
    optimizer = torch.optim.SGD(used.parameters(), lr=LR)

    def compute(index, x, y):
        if fails is not None:
            fails(index)
        return function(used, x, y)

    backward = gradsync.functional.fit(compute)
    states, replays = [], 0
    for step, index in gradsync.sync_every(used, WINDOW, range(num)):
        loss = backward(step, index, *batch(ROWS, seed=10 * index + rank))
        replays += step.replay
        whole = function(model_with_memory(model), *batch(ROWS, seed=10 * index + rank))
        if isinstance(whole, gradsync.LossSum):
            assert loss.count == whole.count
            loss, whole = loss.loss, whole.loss
        assert not loss.requires_grad
        if not step.replay:
            torch.testing.assert_close(loss, whole.detach())
        if step.last:
            optimizer.step()
            optimizer.zero_grad()
            states.append([p.detach().clone() for p in model.parameters()])
    return states, backward, replays


def model_with_memory(model):
    twin = Net()
    twin.load_state_dict(model.state_dict())
    return twin


def limited(kind, limits, wheres=("forward", "backward")):
    """Held and at boundaries, early and late in the graph, with means and sums."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    for where in wheres:
        for at, function in ((1, mean_loss), (3, sum_loss)):
            with tried_whole:
                states, backward, _ = looped(kind, where, limits, at, function)
            compare(states, truth(regular(), function))
            limit = limits[rank]
            assert (backward.parts > 1) == (limit < ROWS)
            assert backward.rows <= limit


def uneven(kind):
    """Ranks with 5 and 3 items: the tail is exact, and a replay runs in parts as well, and weighs nothing."""
    rank = dist.get_rank()
    states, _, replays = looped(kind, "backward", [2, 4], 2, num=5 - 2 * rank)
    compare(states, truth([regular()[0], [(0, 3), (0, 4)]]))
    assert replays == rank


def broken(kind):
    """A part fails for another reason after the armed backward did for lack of memory: no rank waits for ever."""
    rank = dist.get_rank()
    fails = Fails(WINDOW - 1, 2) if rank == 1 else None
    try:
        with tried_whole:
            looped(kind, "backward", [6, 3], 2, num=WINDOW, fails=fails)
    except ValueError:
        assert rank == 1
    else:
        assert rank == 0
