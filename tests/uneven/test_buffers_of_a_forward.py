"""Buffers that a forward makes (a position table, a mask) are a rank's own: ranks make them in different micro-batches."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

import gradsync
from tests.support.compare import assert_equal_state
from tests.support.reference import micro_batch, train
from tests.support.verdicts import on_engine


class Branch(nn.Module):
    """It makes its table in its first forward."""

    def __init__(self, kind: int):
        super().__init__()
        self.kind, self.linear = kind, nn.Linear(3, 2).double()
        self.register_buffer("table", None, persistent=False)
        self.register_buffer("scale", torch.full((3,), 7.0, dtype=torch.float64))

    def forward(self, x):
        if self.table is None:
            self.table = torch.arange(self.kind, self.kind + 3.0, dtype=torch.float64).cos()
        return (self.linear(x * self.table) / self.scale.mean()).square().mean()


class Branches(nn.Module):
    """One of two branches a micro-batch; other ranks begin with the other one."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.branches = nn.ModuleList([Branch(0), Branch(1)])

    def forward(self, rank: int, index: int):
        return self.branches[(rank + index // 2) % 2](micro_batch(rank, index))


STEPS = 2


def trained(engine: str, lengths: list[int], dropped: list[list[int]]) -> dict:
    rank, model = dist.get_rank(), Branches()
    home = on_engine(model, engine)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    @gradsync.accumulating(STEPS, model=home, optimizer=optimizer, skip=ValueError)
    def step(index):
        if [rank, index] in dropped:
            raise ValueError
        return home(rank, index)

    for index in step.over(range(lengths[rank])):
        step(index)
    return model.state_dict()


@pytest.mark.parametrize("engine", ["bare", "find_unused"])
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize(
    ("lengths", "dropped"), [([8, 8, 8], []), ([4, 4, 4], [[0, 0]]), ([4, 4, 4], [[1, 0], [1, 1]]), ([5, 0, 5], []), ([0, 5, 3], [])]
)
def test_a_table_that_ranks_make_at_different_times(ranks, size, engine, lengths, dropped):
    """One rank's table was filled with another's, or with the next buffer; or the ranks waited for each other."""
    lengths, windows = lengths[:size], []
    for start in range(0, max(lengths), STEPS):
        all_of_it = [(r, i) for r in range(size) for i in range(start, min(start + STEPS, lengths[r]))]
        windows.append([one for one in all_of_it if list(one) not in dropped])

    def weigh(model, items):
        return torch.stack([model(*one) for one in items]).mean()

    _, model = train(Branches(), [one for one in windows if one], weigh, lr=0.1)
    for came in ranks(size).run(trained, engine, lengths, dropped, limit=20):
        assert_equal_state(came, model.state_dict(), 1e-12)
