"""Decorated steps whose ranks lack memory, against float64 by hand."""

from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradsync
from gradsync.parts import Sizes, halving
from tests.parts.limited import Net, assert_same, batch, mean_loss, sum_loss
from tests.support.traps import Trap

WINDOW, ROWS, LR = 3, 6, 0.1

OPTIONS = {"find": {"find_unused_parameters": True}, "views": {"gradient_as_bucket_view": True}}


def on(kind, model):
    """The model on the engine of that name."""
    if kind == "bare":
        return model
    if kind == "replicate":
        from torch.distributed._composable.replicate import replicate

        return replicate(model)
    return DistributedDataParallel(model, bucket_cap_mb=0.0001, **OPTIONS.get(kind, {}))


def truth(windows, function=mean_loss, make=Net, rows=lambda rank, index: ROWS):
    """Parameters after each window, which is a list of (rank, index); None drops it."""
    model, states = make(), []
    for items in windows:
        if items is None:
            continue
        model.zero_grad()
        found = [function(model, *batch(rows(rank, index), seed=10 * index + rank)) for rank, index in items]
        if isinstance(found[0], torch.Tensor):
            loss = sum(found) / len(found)
        else:
            loss = sum(one.loss for one in found) / sum(one.count for one in found)
        loss.backward()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter -= LR * parameter.grad
        states.append([parameter.detach().clone() for parameter in model.parameters()])
    return states


def regular(num_windows=2):
    ranks = range(dist.get_world_size() if dist.is_initialized() else 1)
    return [[(r, WINDOW * w + i) for r in ranks for i in range(WINDOW)] for w in range(num_windows)]


class Fails:
    """A step's function that raises at some index, in its n-th part."""

    def __init__(self, index, part):
        self.index, self.part, self.seen = index, part, 0

    def __call__(self, index):
        if index == self.index:
            self.seen += 1
            if self.seen == self.part:
                raise ValueError("not about memory")


def train(kind, where, limits, at, function=mean_loss, make=Net, num=2 * WINDOW, fails=None, over=None, steps=WINDOW, **options):
    """Parameters after each update, and the decorated function."""
    halving.free = lambda: None  # a collection for each failure would take most of the time
    rank = dist.get_rank() if dist.is_initialized() else 0
    model = make(at=at)
    model.limit, model.where = limits[rank % len(limits)], where
    used = on(kind, model)
    optimizer = torch.optim.SGD(used.parameters(), lr=LR)

    @gradsync.accumulating(steps, fit=True, **options)
    def step(model, optimizer, index, x, y):
        if fails is not None:
            fails(index)
        return function(model, x, y)

    states = []

    def run(index, rows=ROWS):
        before = step.progress.updates
        step(used, optimizer, index, *batch(rows, seed=10 * index + rank))
        if step.progress.updates > before:
            states.append([p.detach().clone() for p in model.parameters()])

    if over is not None:
        for index in step.over(range(over)):
            run(index)
        if len(states) < step.progress.updates:
            states.append([p.detach().clone() for p in model.parameters()])
    else:
        for index in range(num):
            run(index)
    return states, step.progress


def a_part_that_fails(kind, sums):
    """Rank 1's second part fails in its backward, at a boundary, with an exception that nobody skips; what each sees."""
    rank = dist.get_rank()
    model = Net(at=2)
    model.limit, model.where = (2, "forward") if rank else (ROWS, "forward")
    optimizer, parts, seen = torch.optim.SGD(model.parameters(), lr=LR), [], []

    @gradsync.accumulating(WINDOW, fit=True)
    def step(model, optimizer, number, x, y):
        loss = (sum_loss if sums else mean_loss)(model, x, y)
        parts.append(number)
        if rank and number == WINDOW - 1 and parts.count(number) == 2:
            error = ZeroDivisionError()
            return gradsync.LossSum(Trap.apply(loss.loss, error), loss.count) if sums else Trap.apply(loss, error)
        return loss

    used = on(kind, model)
    for number in range(2 * WINDOW):
        try:
            step(used, optimizer, number, *batch(ROWS, seed=10 * number + rank))
        except (ZeroDivisionError, gradsync.GradSyncError) as error:
            seen.append((number, type(error).__name__))
    return seen


def compare(states, expected):
    assert len(states) == len(expected), (len(states), len(expected))
    for some, others in zip(states, expected):
        assert_same(some, others, 1e-11)


# Sizes that are not remembered: each call is tried whole, and so each boundary fails anew.
tried_whole = mock.patch.object(Sizes, "__bool__", lambda self: False)


def held_and_boundary(kind, where, limits):
    """Failures early and late in the graph, held and at boundaries, with means and sums."""
    for at in (1, 3):
        for function in (mean_loss, sum_loss):
            with tried_whole:
                states, progress = train(kind, where, limits, at, function)
            compare(states, truth(regular(), function))
            limit = limits[dist.get_rank()]
            assert (progress.parts > 1) == (limit < ROWS), progress
            assert progress.rows <= limit
    states, progress = train(kind, where, limits, at)
    compare(states, truth(regular()))


def composed(kind):
    """A real scaler with clipping, `sync="each"`, and `steps` as a function, each rank with another limit."""
    rank = dist.get_rank()
    limits = [2, 6, 1]
    for where in ("forward", "backward"):
        states, _ = train(kind, where, limits, 2, sync="each")
        compare(states, truth(regular()))
        sizes = (3, 1, 2)
        states, _ = train(kind, where, limits, 2, steps=lambda window: sizes[window])
        starts = (0, 3, 4)
        ranks = range(dist.get_world_size())
        compare(states, truth([[(r, k + i) for r in ranks for i in range(n)] for k, n in zip(starts, sizes)]))
        model = Net(at=2)
        model.limit, model.where = limits[rank], where
        used, scaler = on(kind, model), torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=1)
        optimizer = torch.optim.SGD(used.parameters(), lr=LR)

        @gradsync.accumulating(WINDOW, fit=True, clip_norm=1e9)
        def step(model, optimizer, scaler, x, y):
            return mean_loss(model, x, y)

        for index in range(2 * WINDOW):
            step(used, optimizer, scaler, *batch(ROWS, seed=10 * index + rank))
        compare([[p.detach() for p in model.parameters()]], truth(regular())[-1:])
        assert scaler.get_scale() == 2.0**10


def uneven(kind, where):
    """Ranks with 5 and 4 items, known lengths: the tail closes with its exact mean."""
    rank = dist.get_rank()
    states, _ = train(kind, where, [2, 4], 2, over=5 - rank)
    compare(states, truth([regular()[0], [(0, 3), (0, 4), (1, 3)]]))


def skipping(kind, where):
    """An error of a type in `skip` before any gradient drops its micro-batch; after the first part, the window."""
    rank = dist.get_rank()
    full = regular(3)
    for index in (1, 2):  # held, and the boundary
        for limit in (6, 2):
            fails = Fails(index, 1) if rank == 1 else None
            states, progress = train(kind, where, [limit, limit], 2, fails=fails, num=9, skip=ValueError)
            window = [item for item in full[0] if item != (1, index)]
            compare(states, truth([window, *full[1:]]))
            assert progress.dropped == rank
        # The whole fails for lack of memory; the third call is that of the second part, or the one after a failed part.
        for part in (2, 3):
            fails = Fails(WINDOW + index, part) if rank == 1 else None
            states, progress = train(kind, where, [3, 3], 2, fails=fails, num=9, skip=ValueError)
            failed = rank == 1 and fails.seen >= part
            spoilt = [torch.zeros(())]
            spoilt[0] += failed
            dist.all_reduce(spoilt[0])
            compare(states, truth([full[0], None, full[2]] if spoilt[0] else full))
            assert progress.skipped == (spoilt[0] > 0)


def armed_and_broken(kind):
    """After an armed backward that failed half-way a part fails for another reason: no rank waits for ever."""
    rank = dist.get_rank()
    full = regular(3)
    for skip in (ValueError, ()):
        # Its sizes are not known yet, so that the boundary is tried whole, and fails in its backward.
        fails = Fails(2, 2) if rank == 1 else None
        model = Net(at=2)
        model.where = "backward"
        used = on(kind, model)
        optimizer = torch.optim.SGD(used.parameters(), lr=LR)

        @gradsync.accumulating(WINDOW, fit=True, skip=skip)
        def step(model, optimizer, index, x, y):
            if fails is not None:
                fails(index)
            return mean_loss(model, x, y)

        states = []
        for index in range(9):
            model.limit = 3 if index == 2 and rank == 1 else ROWS
            before, error = step.progress.updates, None
            try:
                step(used, optimizer, index, *batch(ROWS, seed=10 * index + rank))
            except ValueError as raised:
                error = raised
            assert (error is not None) == (index == 2 and rank == 1 and not skip)
            if step.progress.updates > before:
                states.append([p.detach().clone() for p in model.parameters()])
        if skip:
            compare(states, truth(full[1:]))
        else:
            assert step.progress.updates == 3 - rank


class Pair(nn.Module):
    """Two models to the step function; this one is only where they are made."""

    def __init__(self, at=2):
        super().__init__()
        self.first, self.second = Net(at=at), Net(at=1)


def several(kind, where):
    """Two models, two engines, and one without gradients between them."""
    halving.free = lambda: None
    rank = dist.get_rank()
    pair, frozen = Pair(), Net()
    pair.first.limit, pair.first.where = [6, 2][rank], where
    first, second = on(kind, pair.first), on(kind, pair.second)
    optimizer = torch.optim.SGD(pair.parameters(), lr=LR)

    @gradsync.accumulating(WINDOW, fit=True)
    def step(first, second, frozen, optimizer, x, y):
        return mean_loss(lambda x: first(frozen(second(x))), x, y)

    states = []
    for index in range(2 * WINDOW):
        step(first, second, frozen, optimizer, *batch(ROWS, seed=10 * index + rank))
        if step.progress.stepped:
            states.append([p.detach().clone() for p in pair.parameters()])
    assert all(p.grad is None and p.requires_grad for p in frozen.parameters())

    def function(pair, x, y):
        return mean_loss(lambda x: pair.first(Net()(pair.second(x))), x, y)

    compare(states, truth(regular(), function, Pair))


def refused():
    """What other ranks wait for cannot be cut by one alone."""
    from torch.distributed._composable.replicate import replicate
    from torch.distributed.fsdp import fully_shard

    net = lambda: nn.Linear(5, 5).double()  # noqa: E731
    makes = [
        (lambda: fully_shard(net()), "forward of FSDP2 communicates, so that all ranks must run equally many. Leave fit out, and look for a size"),
        (lambda: DistributedDataParallel(net(), static_graph=True), "static_graph=True counts on"),
        (lambda: replicate(net(), static_graph=True), "static_graph=True counts on"),
        (lambda: nn.Sequential(net(), nn.BatchNorm1d(5).double()), "1 is a BatchNorm1d in training"),
    ]
    for make, message in makes:
        model = make()
        optimizer = torch.optim.SGD(model.parameters(), lr=LR)

        @gradsync.accumulating(WINDOW, fit=True)
        def step(model, optimizer, x, y):
            return mean_loss(model, x, y)

        try:
            step(model, optimizer, *batch(ROWS))
        except gradsync.GradSyncError as error:
            assert message in str(error), error
        else:
            raise AssertionError(f"no error says {message}")
