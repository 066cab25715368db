"""Several models in one step, or in steps of their own, on two ranks."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import gradsync
from gradsync import accumulating
from tests.support.compare import assert_equal_updates
from tests.support.models import small_model
from tests.support.recorder import Recorder
from tests.support.reference import mean_loss, micro_batch


def bare(model):
    return model


find_unused = partial(DDP, find_unused_parameters=True)


def by_function(homes, optimizer, items: list, sync: str) -> None:
    @gradsync.accumulating(steps=3, sync=sync)
    def step(one, other, optimizer, x, which):
        return mean_loss((one, other)[which], x)

    for x, which in items:
        step(*homes, optimizer, x, which)


def backward(micro, loss) -> None:
    micro.backward(loss)


def plain_backward(micro, loss) -> None:
    (loss / 3).backward()


def by_iterator(homes, optimizer, items: list, backward) -> None:
    for micro, (x, which) in gradsync.sync_every(homes, 3, items):
        backward(micro, mean_loss(homes[which], x))
        if micro.last:
            optimizer.step()
            optimizer.zero_grad()


def one_of_several(wrap, train, how) -> None:
    """Two models in one step, of which each micro-batch uses one, the boundary's on each rank another."""
    rank = dist.get_rank()
    make = lambda: [nn.Linear(3, 2).double(), small_model()]  # noqa: E731
    torch.manual_seed(1)
    models = make()
    torch.manual_seed(1)
    twins = make()
    homes = [wrap(model) for model in models]
    optimizer = Recorder([p for model in models for p in model.parameters()])
    used = [[1, 0, 0, 1, 1, 1, 0, 0, 0], [1, 1, 1, 0, 0, 0, 1, 0, 0]]
    train(homes, optimizer, [(micro_batch(rank, i), used[rank][i]) for i in range(9)], how)
    for seen, start in zip(optimizer.seen, (0, 3, 6), strict=True):
        places = [(r, i) for r in range(2) for i in range(start, start + 3)]
        loss = sum(mean_loss(twins[used[r][i]], micro_batch(r, i)) for r, i in places) / len(places)
        parameters = [p for twin in twins for p in twin.parameters()]
        for p, gradient, got in zip(parameters, torch.autograd.grad(loss, parameters, allow_unused=True), seen, strict=True):
            assert (gradient is None) == (got is None)
            if gradient is not None:
                assert torch.allclose(got, gradient, rtol=1e-12, atol=1e-14), p.shape
                p.data -= 0.1 * gradient


@pytest.mark.parametrize("wrap", [bare, find_unused], ids=["bare", "find_unused"])
@pytest.mark.parametrize(
    ("train", "how"),
    [(by_function, "window"), (by_function, "each"), (by_iterator, backward), (by_iterator, plain_backward)],
)
def test_ranks_that_use_different_models_in_a_window(ranks, wrap, train, how):
    ranks(2).run(one_of_several, wrap, train, how)


def static_pair(steps: int, sync: str) -> None:
    """Two static graphs in one step, each of which owes a synchronisation of its very first micro-batch."""
    rank = dist.get_rank()
    torch.manual_seed(1)
    models = [nn.Linear(3, 3).double(), small_model()]
    homes = [DDP(model, static_graph=True) for model in models]
    optimizer = Recorder([p for model in models for p in model.parameters()], lr=0.0)

    @gradsync.accumulating(steps=steps, sync=sync)
    def step(one, other, optimizer, x):
        return mean_loss(other, one(x))

    for i in range(3 * steps):
        step(*homes, optimizer, micro_batch(rank, i))
    assert len(optimizer.seen) == 3
    for number, seen in enumerate(optimizer.seen):
        places = [(r, i) for r in range(2) for i in range(number * steps, (number + 1) * steps)]
        loss = sum(mean_loss(models[1], models[0](micro_batch(*place))) for place in places) / len(places)
        for gradient, got in zip(torch.autograd.grad(loss, optimizer.param_groups[0]["params"]), seen, strict=True):
            assert torch.allclose(got, gradient, rtol=1e-12, atol=1e-14), (number, gradient.shape)


@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("sync", ["window", "each"])
def test_two_static_graphs_in_one_step(ranks, steps, sync):
    ranks(2).run(static_pair, steps, sync)


def a_gan() -> None:
    """Two DDP models, each other's bystanders, with cadences of their own."""
    rank = dist.get_rank()
    torch.manual_seed(1)
    g, d = nn.Linear(3, 3).double(), nn.Linear(3, 1).double()
    twin_g, twin_d = copy.deepcopy(g), copy.deepcopy(d)
    home_g, home_d = DDP(g), DDP(d)
    opt_g, opt_d = Recorder(g.parameters()), Recorder(d.parameters())
    g_step = accumulating(steps=2)(lambda g, d, opt, x: -d(g(x)).mean())
    d_step = accumulating(steps=4)(lambda g, d, opt, x: d(g(x)).square().mean())
    for i in range(8):
        d_step(home_g, home_d, opt_d, micro_batch(rank, i))
        g_step(home_g, home_d, opt_g, micro_batch(rank, 50 + i))
    assert len(opt_g.seen) == 4 and len(opt_d.seen) == 2
    # The reference, in the same order.
    sgd_g, sgd_d = Recorder(twin_g.parameters()), Recorder(twin_d.parameters())
    for i in range(8):
        for r in range(2):
            (twin_d(twin_g(micro_batch(r, i)).detach()).square().mean() / 8).backward()
        if i % 4 == 3:
            sgd_d.step(), sgd_d.zero_grad()
        for r in range(2):
            loss = -twin_d(twin_g(micro_batch(r, 50 + i))).mean() / 4
            for p, v in zip(twin_g.parameters(), torch.autograd.grad(loss, list(twin_g.parameters()))):
                p.grad = v if p.grad is None else p.grad + v
        if i % 2 == 1:
            sgd_g.step(), sgd_g.zero_grad()
    assert_equal_updates(opt_g.seen, sgd_g.seen, 1e-11)
    assert_equal_updates(opt_d.seen, sgd_d.seen, 1e-11)


def test_a_gan(ranks):
    ranks(2).run(a_gan)


class Reader(nn.Module):
    """A head on an encoder that it shares with others."""

    def __init__(self, encoder: nn.Module, detached: bool) -> None:
        super().__init__()
        self.encoder, self.head, self.detached = encoder, nn.Linear(3, 3).double(), detached

    def forward(self, x):
        seen = self.encoder(x)
        return self.head(seen.detach() if self.detached else seen)


def shared_with_a_bystander(wrap) -> None:
    """An actor whose optimizer has its head only, and a critic that shares its encoder and is not trained here."""
    torch.manual_seed(1)
    encoder = nn.Linear(3, 3).double()
    actor, critic = Reader(encoder, detached=True), Reader(encoder, detached=False)
    twins = copy.deepcopy((actor, critic))
    optimizers = [torch.optim.SGD(part.parameters(), lr=0.1) for part in (actor.head, critic)]
    homes = [wrap(model) for model in (actor, critic)]

    def losses(actor, critic, x):
        return critic(x).square().mean(), -critic(actor(x)).mean()

    criticise = accumulating(steps=2)(lambda critic, optimizer, x: losses(lambda x: x, critic, x)[0])
    act = accumulating(steps=2)(lambda actor, critic, optimizer, x: losses(actor, critic, x)[1])
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    by_hand = [torch.optim.SGD(part.parameters(), lr=0.1) for part in (twins[0].head, twins[1])]
    for start in (0, 2, 4):
        for x in (micro_batch(rank, start), micro_batch(rank, start + 1)):
            criticise(homes[1], optimizers[1], x)
        for x in (micro_batch(rank, start), micro_batch(rank, start + 1)):
            act(*homes, optimizers[0], x)
        assert all(p.grad is None for model in (actor, critic) for p in model.parameters())
        window = [micro_batch(r, i) for r in range(size) for i in (start, start + 1)]
        for which in (1, 0):
            sum(losses(*twins, x)[0 if which else 1] for x in window).div(len(window)).backward()
            by_hand[which].step()
            for twin in twins:
                twin.zero_grad()
    for model, twin in zip((actor, critic), twins, strict=True):
        for p, expected in zip(model.parameters(), twin.parameters(), strict=True):
            assert torch.allclose(p, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("wrap", [bare, find_unused], ids=["bare", "ddp"])
@pytest.mark.parametrize("size", [1, 2])
def test_a_bystander_that_shares_parameters_with_what_is_trained_keeps_no_gradient(ranks, size, wrap):
    ranks(size).run(shared_with_a_bystander, wrap)


def a_plain_tensor() -> None:
    """A tensor that is no parameter, in the optimizer beside the model's: SAC's temperature."""
    model = small_model()
    scale = torch.ones((), dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.SGD([*model.parameters(), scale], lr=0.1)
    step = accumulating(steps=2)(lambda model, optimizer, x: mean_loss(model, x) * scale)
    rank, size = dist.get_rank(), dist.get_world_size()
    for i in range(4):
        step(model, optimizer, micro_batch(rank, i))
    twin, own = small_model(), torch.ones((), dtype=torch.float64, requires_grad=True)
    by_hand = torch.optim.SGD([*twin.parameters(), own], lr=0.1)
    for start in (0, 2):
        window = [micro_batch(r, i) for r in range(size) for i in (start, start + 1)]
        (sum(mean_loss(twin, x) for x in window) / len(window) * own).backward()
        by_hand.step()
        by_hand.zero_grad()
    for p, expected in zip([*model.parameters(), scale], [*twin.parameters(), own], strict=True):
        assert torch.allclose(p, expected, rtol=0, atol=1e-12)


def test_a_plain_tensor_in_the_optimizer(ranks):
    ranks(2).run(a_plain_tensor)
