"""Buffers that a forward replaces by longer ones: a rotary table, a bank of what it has seen."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

import gradsync
from tests.support.compare import assert_equal_state
from tests.support.reference import micro_batch, train
from tests.support.verdicts import on_engine


class Rotary(nn.Module):
    """Its table is as long as the longest sequence so far."""

    def __init__(self, length: int = 1):
        super().__init__()
        torch.manual_seed(3)
        self.linear, self.norm = nn.Linear(3, 2).double(), nn.BatchNorm1d(3, affine=False).double()
        self.register_buffer("after", torch.zeros(3, dtype=torch.int32))
        self.register_buffer("table", torch.arange(length, dtype=torch.float64).cos())
        self.register_buffer("zero", torch.zeros(2, dtype=torch.float64))

    def loss(self, rank: int, index: int, length: int):
        if length > len(self.table):
            self.table = torch.arange(length, dtype=torch.float64).cos()
        self.after += index  # what is sent beside it
        weight = (self.table[:length].sum() + self.zero.sum()).abs()
        return (self.linear(micro_batch(rank, index)) * weight).square().mean()


class Call(nn.Module):
    """A model in a DDP, whose forward is its loss."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, *args):
        return self.model.loss(*args)


STEPS = 2

LENGTHS = {  # of the sequences, by rank and index
    "rank 0 grows": lambda rank, index: 4 if (rank, index) == (0, 3) else 1,
    "rank 1 grows": lambda rank, index: 3 if (rank, index) == (1, 1) else 1,
    "each its own": lambda rank, index: 2 + (5 * rank + 3 * index) % 7,
    "each longer every time": lambda rank, index: 1 + index + rank,
    "all alike": lambda rank, index: 1 + index,  # noqa: ARG005
    "later alike": lambda rank, index: 6 if index >= 2 * (2 - rank) else 1,
}


def trained(home: str, way: str, kind: str, items: list[int], length: int = 1) -> dict:
    """The state after the last window."""
    rank, model = dist.get_rank(), Rotary(length)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    called = on_engine(Call(model), home)

    def loss_of(index):
        return called(rank, index, LENGTHS[kind](rank, index))

    if way == "sync_every":
        for micro, index in gradsync.sync_every(called, STEPS, range(items[rank])):
            micro.backward(loss_of(index))
            if micro.last:
                optimizer.step()
                optimizer.zero_grad()
        return model.state_dict()

    options = {"overlap": 1} if way == "overlap" else {}

    @gradsync.accumulating(STEPS, model=called, optimizer=optimizer, **options)
    def step(index):
        return loss_of(index)

    loop = range(items[rank]) if way == "calls" else step.over(range(items[rank]))
    for index in loop:
        step(index)
    step.settle()
    return model.state_dict()


def windows_of(items: list[int]) -> list[list[tuple[int, int]]]:
    starts = range(0, max(items), STEPS)
    return [[(r, i) for r, num in enumerate(items) for i in range(s, min(s + STEPS, num))] for s in starts]


WAYS = [("calls", [6, 6]), ("over", [6, 3, 0]), ("over", [0, 6, 4]), ("sync_every", [6, 5]), ("overlap", [6, 3])]


@pytest.mark.parametrize("kind", LENGTHS)
@pytest.mark.parametrize("home", ["bare", "ddp"])
@pytest.mark.parametrize(("way", "items"), WAYS)
def test_a_table_that_is_of_another_length_on_each_rank(ranks, kind, home, way, items):
    size = len(items)

    def weigh(model, window):
        return torch.stack([model.loss(r, i, LENGTHS[kind](r, i)) for r, i in window]).mean()

    states = ranks(size).run(trained, home, way, kind, items, limit=20)
    if way == "overlap":  # against a table that is long enough from the start: updates are late in both
        expected = ranks(size).run(trained, home, way, kind, items, 20, limit=20)[0]
    else:
        expected = train(Rotary(), windows_of(items), weigh, lr=0.1)[1].state_dict()
    for state in states:
        assert_equal_state(weights(state), weights(expected), 1e-12)
        for name in ("after", "zero"):
            assert torch.equal(state[name], states[0][name]), name
    tables = [state["table"] for state in states]
    if len({len(one) for one in tables}) == 1:
        assert all(torch.equal(one, tables[0]) for one in tables)


def weights(state: dict) -> dict:
    return {name: value for name, value in state.items() if "linear" in name}


class Bank(nn.Module):
    """It keeps what it has seen."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 2).double()
        self.register_buffer("bank", torch.zeros(0, 3, dtype=torch.float64))

    def forward(self, x):
        self.bank = torch.cat([self.bank, x.mean(dim=0, keepdim=True)])
        return self.linear(x - self.bank.mean(dim=0)).square().mean()


def banked(home: str, overlap: int) -> list[torch.Tensor]:
    model = Bank()
    called = on_engine(model, home)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    @gradsync.accumulating(STEPS, model=called, optimizer=optimizer, overlap=overlap)
    def step(index):
        return called(micro_batch(dist.get_rank(), index))

    banks = []
    for index in range(6):
        step(index)
        banks.append(model.bank.clone())
    step.settle()
    return banks[STEPS - 1 :: STEPS]


@pytest.mark.parametrize("overlap", [0, 1])
@pytest.mark.parametrize("home", ["bare", "ddp"])
def test_a_bank_that_grows_alike_on_all_ranks_is_that_of_rank_0(ranks, home, overlap):
    rows = [micro_batch(0, index).mean(dim=0) for index in range(6)]
    for banks in ranks(2).run(banked, home, overlap, limit=20):
        for number, bank in enumerate(banks):
            assert torch.equal(bank, torch.stack(rows[: STEPS * (number + 1)]))


def evaluated(home: str) -> tuple[torch.Tensor, dict]:
    """Rank 1 evaluates in inference mode, and its table is of that mode."""
    rank, model = dist.get_rank(), Rotary()
    called = on_engine(Call(model), home)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = gradsync.accumulating(STEPS, model=called, optimizer=optimizer)(lambda index, length: called(rank, index, length))
    for index in range(2):
        step(index, 1)
    with torch.inference_mode():
        if rank == 1:
            model.loss(rank, 0, 4)
    for index in range(2, 6):
        step(index, 3)
    return model.table, model.state_dict()


@pytest.mark.parametrize("home", ["bare", "ddp"])
def test_a_table_that_an_evaluation_made_on_one_rank(ranks, home):
    windows = [[(r, i) for r in range(2) for i in (s, s + 1)] for s in (0, 2, 4)]
    lengths = [1, 1, 3, 3, 3, 3]
    _, model = train(Rotary(), windows, lambda m, w: torch.stack([m.loss(r, i, lengths[i]) for r, i in w]).mean(), lr=0.1)
    for rank, (table, state) in enumerate(ranks(2).run(evaluated, home, limit=20)):
        assert len(table) == (3, 4)[rank]
        assert_equal_state({"w": state["linear.weight"]}, {"w": model.linear.weight}, 1e-12)


class Holder(nn.Module):
    """A buffer that is summed up; what else it has, a case adds."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 2).double()
        self.register_buffer("first", torch.zeros(2, dtype=torch.float64))
        self.register_buffer("other", None)
        self.is_lazy = False

    def forward(self, x):
        if self.is_lazy and not hasattr(self, "made"):
            self.register_buffer("made", torch.zeros(3, dtype=torch.float64))
        with torch.no_grad():
            for buffer in self.buffers():
                buffer += x.sum()
        return self.linear(x).square().mean()


def held(home: str, what: str) -> list[list[torch.Tensor]]:
    """The buffers after each window."""
    rank, model = dist.get_rank(), Holder()
    model.is_lazy = what == "made by a forward, on rank 0 before the first window"
    called = on_engine(model, home)
    step = gradsync.accumulating(STEPS, model=called, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))(called)
    if what == "tied":
        model.other = model.first
    if model.is_lazy and rank == 0:
        with torch.no_grad():
            model(micro_batch(0, 9))
    states = []
    for window in range(5):
        if window == 2 and what == "filled":
            model.other = torch.zeros(4, dtype=torch.float64)
        if window == 2 and what == "tied":
            model.other = model.first.clone()
        if what == "caught up" and window == (1 if rank == 0 else 3):
            model.other = torch.full((4,), float(rank), dtype=torch.float64)
        for index in range(STEPS):
            step(micro_batch(rank, window * STEPS + index))
        states.append([buffer.clone() for buffer in model.buffers()])
    return states


@pytest.mark.parametrize("what", ["filled", "tied", "caught up", "made by a forward, on rank 0 before the first window"])
@pytest.mark.parametrize("home", ["bare", "ddp"])
def test_buffers_that_all_ranks_have_in_one_shape_are_equal(ranks, home, what):
    if home == "bare" and what.startswith("made"):
        pytest.skip("where gradsync makes the DDP, other buffers on another rank are an error in words")
    mine, theirs = ranks(2).run(held, home, what, limit=20)
    for window in range(5):
        assert len(mine[window]) == len(theirs[window]) or (what == "caught up" and window in (1, 2))
        for one, other in zip(mine[window], theirs[window]):
            assert torch.equal(one, other)
    assert len(mine[4]) == 2 or what.startswith("tied")
