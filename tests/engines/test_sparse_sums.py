"""Sparse gradients whose values are those of other gradients: torch's reducer divides each of them in place."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import gradsync


class Sum(nn.Module):
    def __init__(self):
        super().__init__()
        self.word, self.kind = nn.Embedding(4, 2, sparse=True), nn.Embedding(4, 2, sparse=True)
        self.dense = nn.Linear(2, 2, bias=False)

    def forward(self, x):
        return ((self.word(x) + self.kind(x) + self.dense(torch.ones(2))) * torch.ones(2, 2)).sum()


def gradients(wrap: str, how: str) -> list:
    torch.manual_seed(0)
    inner, seen = Sum(), []
    model = {"bare": lambda m: m, "ddp": DDP, "find_unused": lambda m: DDP(m, find_unused_parameters=True)}[wrap](inner)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.register_step_pre_hook(lambda *_: seen.append([p.grad.to_dense().tolist() for p in inner.parameters()]))
    data = [torch.tensor([0, 1])] * 2
    started = [parameter.detach().clone() for parameter in inner.parameters()]
    if how in ("sync_every", "plain"):
        for step, x in gradsync.sync_every(model, 1, data):
            model(x).backward() if how == "plain" else step.backward(model(x))
            assert all(map(torch.equal, inner.parameters(), started)), "a backward writes to gradients only"
            optimizer.step()
            optimizer.zero_grad()
            started = [parameter.detach().clone() for parameter in inner.parameters()]
    else:
        step = gradsync.accumulating(steps=1, sync=how)(lambda model, optimizer, x: model(x))
        for x in data:
            step(model, optimizer, x)
    return seen


@pytest.mark.parametrize("how", ["window", "each", "sync_every", "plain"])
@pytest.mark.parametrize("wrap", ["bare", "ddp", "find_unused"])
@pytest.mark.parametrize("size", [2, 3])
def test_two_sparse_embeddings_that_are_added_up(ranks, size, wrap, how):
    """All ranks have the same data: each row that was looked up has a gradient of 1, as on one rank."""
    rows = [[1.0, 1.0], [1.0, 1.0], [0.0, 0.0], [0.0, 0.0]]
    for seen in ranks(size).run(gradients, wrap, how):
        for found in seen:
            for mine, true in zip(found, [rows, rows, [[2.0, 2.0], [2.0, 2.0]]], strict=True):
                torch.testing.assert_close(torch.tensor(mine), torch.tensor(true))


def empty_bags(wrap: str) -> list:
    """Momentum moves an embedding that was used, though no row of it was, in the second window."""
    torch.manual_seed(0)
    bags = nn.EmbeddingBag(4, 2, sparse=True)
    model = DDP(bags, find_unused_parameters=True) if wrap == "find_unused" else bags
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    step = gradsync.accumulating(steps=1)(lambda model, optimizer, rows: model(rows, torch.tensor([0])).sum())
    for rows in (torch.tensor([0, 1]), torch.tensor([], dtype=torch.int64)):
        step(model, optimizer, rows)
    return bags.weight.tolist()


def test_a_sparse_gradient_without_rows_is_a_gradient(ranks):
    (alone,) = ranks(1).run(empty_bags, "bare")
    for wrap in ("bare", "find_unused"):
        for came in ranks(2).run(empty_bags, wrap):
            torch.testing.assert_close(torch.tensor(came), torch.tensor(alone))
