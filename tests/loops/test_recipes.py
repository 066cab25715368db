"""Loops that no window fits, each a recipe that is run: LBFGS, and gradient caching."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import gradsync
from tests.support.models import small_model
from tests.support.reference import mean_loss, micro_batch
from tests.support.verdicts import FullRecorder, compare, exact, on_engine, verdict, verdicts

HOMES = [("bare", 1), ("bare", 2), ("ddp", 2), ("find_unused", 2), ("bare", 3)]


def lbfgs(engine: str, line_search: str | None):
    """Each evaluation of the closure is a window: held backwards, then `sync_gradients`; the loss is averaged by hand."""
    rank, size, num = dist.get_rank(), dist.get_world_size(), 3
    model = small_model()
    home = gradsync.ddp(on_engine(model, engine))
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4, line_search_fn=line_search)

    def closure():
        optimizer.zero_grad()
        total = torch.zeros((), dtype=torch.float64)
        with gradsync.no_sync(home):
            for i in range(num):
                loss = mean_loss(home, micro_batch(rank, i)) / num
                loss.backward()
                total += loss.detach()
        gradsync.sync_gradients(home)
        dist.all_reduce(total)
        return total / size

    twin = small_model()
    its = torch.optim.LBFGS(twin.parameters(), lr=0.5, max_iter=4, line_search_fn=line_search)

    def whole():
        its.zero_grad()
        loss = sum(mean_loss(twin, micro_batch(r, i)) for r in range(size) for i in range(num)) / (size * num)
        loss.backward()
        return loss

    def run():
        for _ in range(3):
            optimizer.step(closure)
            its.step(whole)
            for p, q in zip(model.parameters(), twin.parameters(), strict=True):
                assert torch.allclose(p, q, rtol=1e-9, atol=1e-11), (p - q).abs().max()

    return verdict(run)


@pytest.mark.parametrize("line_search", [None, "strong_wolfe"])
@pytest.mark.parametrize(("engine", "size"), HOMES)
def test_lbfgs(ranks, engine, size, line_search):
    exact(verdicts(ranks(size), lbfgs, engine, line_search))


def contrast(y):
    """A loss in which every row meets every other: micro-batches cannot be taken one by one."""
    return torch.logsumexp(y @ y.T, dim=1).mean() + y.square().mean()


def sync_gradients(home, pairs: list) -> None:
    with gradsync.no_sync(home):
        for x, grad in pairs:
            home(x).backward(grad)
    gradsync.sync_gradients(home)


def plain(home, pairs: list) -> None:
    for _, (x, grad) in gradsync.sync_every(home, len(pairs), pairs):
        home(x).backward(grad)


def step_backward(home, pairs: list) -> None:
    for step, (x, grad) in gradsync.sync_every(home, len(pairs), pairs):
        step.backward((home(x) * grad).sum() * step.size)  # the sum over chunks, of which it makes the mean


def cached(engine: str, run_chunks):
    """Gradient caching: the loss's gradient at the embeddings first, then each chunk's backward from it."""
    rank, size, num = dist.get_rank(), dist.get_world_size(), 3
    model = small_model()
    home = on_engine(model, engine)
    home = gradsync.ddp(home) if run_chunks is sync_gradients else home
    optimizer = FullRecorder(model.parameters())

    def cache(chunks):
        with torch.no_grad():
            rows = torch.cat([home(x) for x in chunks])
        rows.requires_grad_()
        return torch.autograd.grad(contrast(rows), rows)[0].split([len(x) for x in chunks])

    def run():
        for window in range(2):
            chunks = [micro_batch(rank, 10 * window + i) for i in range(num)]
            run_chunks(home, list(zip(chunks, cache(chunks), strict=True)))
            optimizer.step()
            optimizer.zero_grad()
        twin = small_model()
        its = FullRecorder(twin.parameters())
        for window in range(2):
            for r in range(size):
                y = twin(torch.cat([micro_batch(r, 10 * window + i) for i in range(num)]))
                (contrast(y) / size).backward()
            its.step()
            its.zero_grad()
        compare(optimizer.seen, its.seen)

    return verdict(run)


@pytest.mark.parametrize("run_chunks", [sync_gradients, plain, step_backward])
@pytest.mark.parametrize(("engine", "size"), HOMES)
def test_gradient_caching(ranks, engine, size, run_chunks):
    exact(verdicts(ranks(size), cached, engine, run_chunks))
