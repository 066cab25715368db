"""`gradsync.functional.rows_that_fit`: a size found on all ranks together, where forwards communicate."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

import gradsync
from gradsync.parts import peak
from gradsync.parts.peak import Took
from tests.parts.limited import Limit
from tests.support.ranks import Ranks

WIDTH, MOST = 4, 24


class Net(nn.Module):
    """Draws random numbers, and changes a buffer."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)
        self.register_buffer("calls", torch.zeros(()))
        self.limit, self.log = 10**9, []

    def forward(self, x):
        self.calls += 1
        x = Limit.apply(self.first(x), self.limit, "forward", self.log)
        return self.second(nn.functional.dropout(x, 0.5))


def model_of(kind):
    model = Net()
    if kind == "fsdp":
        from torch.distributed.fsdp import fully_shard

        for layer in (model.first, model.second, model):
            fully_shard(layer)
    return gradsync.ddp(model) if kind == "ddp" else model


def searched(kind, room, limit=10**9):
    """The answer, and what was tried, where rank r has memory for `room[r]` rows beside the parameters'."""
    rank = dist.get_rank()
    model, tried = model_of(kind), []
    inner = model.module if kind == "ddp" else model
    inner.limit = limit

    def function(rows):
        tried.append(rows)
        assert rows <= room[rank], "it would fail with the others waiting"
        return model(torch.ones(rows, WIDTH)).square().mean()

    def meter(attempt):
        attempt()
        return Took(100.0 + 3 * tried[-1], (100.0 + 3 * room[rank]) / peak._MARGIN)

    state = torch.get_rng_state()
    found = gradsync.functional.rows_that_fit(model, function, MOST, meter=meter)
    assert torch.equal(state, torch.get_rng_state()) and not inner.calls
    assert all(parameter.grad is None for parameter in model.parameters())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    @gradsync.accumulating(2)
    def step(model, optimizer, x):
        return model(x).square().mean()

    for _ in range(4):  # it trains on as if nothing had been
        step(model, optimizer, torch.ones(1, WIDTH))
    assert step.progress.updates == 2
    return found, tried


@pytest.mark.parametrize("kind", ["fsdp", "ddp"])
def test_no_rank_fails_while_others_wait(ranks, kind):
    """The smallest rank decides, before any attempt that it could not finish; with room for all, the most is tried."""
    assert ranks(2).run(searched, kind, [21, 9]) == [(8, [1, 2, 4, 8])] * 2
    assert ranks(2).run(searched, kind, [100, 24]) == [(24, [1, 2, 4, 8, 16, 24])] * 2


def test_an_attempt_that_fails_on_all_ranks(ranks):
    """The size before it is the answer."""
    assert ranks(2).run(searched, "fsdp", [99, 99], 5) == [(4, [1, 2, 4, 8])] * 2


def on_some_ranks():
    """Ranks 0 and 2 hold a model; the other one runs nothing."""
    group = dist.new_group([0, 2])
    if dist.get_rank() == 1:
        return None
    model, most = Net(), []
    model.limit = 5 + dist.get_rank()
    ddp = nn.parallel.DistributedDataParallel(model, process_group=group)
    for limit in (5 + dist.get_rank(), dist.get_rank()):
        model.limit = limit
        try:
            most.append(gradsync.functional.rows_that_fit(ddp, lambda rows: ddp(torch.ones(rows, WIDTH)).sum(), 6))
        except gradsync.GradSyncError as error:
            most.append(str(error))
    return most


def test_a_model_on_some_of_the_ranks(ranks):
    """Its own ranks alone agree, and an error names them by their numbers."""
    first, none, last = ranks(3).run(on_some_ranks)
    assert none is None and first[0] == last[0] == 4
    assert first[1] == last[1] and "it does not on rank 0." in first[1]


def refused():
    model = model_of("bare")
    texts = []
    rank = dist.get_rank()
    for most, limit in ((4, rank), (2 + rank, 9)):
        model.limit = limit
        with pytest.raises(gradsync.GradSyncError) as caught:
            gradsync.functional.rows_that_fit(model, lambda rows: model(torch.ones(rows, WIDTH)).sum(), most)
        texts.append(str(caught.value))
    model(torch.ones(1, WIDTH)).sum().backward()
    with pytest.raises(gradsync.GradSyncError, match="a model without gradients"):
        gradsync.functional.rows_that_fit(model, len, 4)
    return texts


def test_refused(ranks):
    """What no size can help, and ranks that differ, are errors on every rank."""
    for one_row, most in ranks(2).run(refused):
        assert "it does not on rank 0" in one_row
        assert "same most, but rank 0 has 2, rank 1 has 3" in most
    with pytest.raises(ValueError, match="from 1, but it is 0"):
        gradsync.functional.rows_that_fit(model_of("bare"), len, 0)


def taken():
    measure = peak.meter_of(torch.device("cpu"))
    for _ in range(2):
        torch.ones(30, 2**18)  # which the allocator keeps, and would hand out again
    return [tuple(measure(lambda n=n: torch.ones(n, 2**18).sum())) for n in (128, 24, 48)]


def test_the_devices_own_counters():
    """On a CPU they are the process's: an attempt that takes 128 MiB is seen, and one after it that takes less."""
    alone = Ranks(1)  # a process of its own: in this one other tests' threads take and free memory, too
    try:
        took = alone.run(taken)[0]
    finally:
        alone.stop()
    for size, (most, free) in zip((128, 24, 48), took):
        assert 0.8 * size * 2**20 < most < 1.5 * size * 2**20
        assert free > 0


def test_an_error_of_another_kind_goes_on():
    """And leaves everything as it was."""
    model = model_of("bare")

    def function(rows):
        model(torch.ones(rows, WIDTH)).sum().backward()
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        gradsync.functional.rows_that_fit(model, function, 4)
    assert not model.calls and all(parameter.grad is None for parameter in model.parameters())
