"""FSDP1 between backwards: what a forward without one has left must not stay in the model, and what is held must."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

from gradsync import accumulating
from tests.support.models import small_model
from tests.support.reference import mean_loss, micro_batch, train, window_mean


def fsdp1(module: nn.Module, strategy: str, use_orig_params: bool = True) -> nn.Module:
    return FullyShardedDataParallel(
        module,
        sharding_strategy=ShardingStrategy[strategy],
        use_orig_params=use_orig_params,
        device_id=torch.device("cpu"),
    )


def values(model: nn.Module) -> torch.Tensor:
    """All parameters, whole, in the order of the bare model."""
    if isinstance(model, FullyShardedDataParallel):
        with FullyShardedDataParallel.summon_full_params(model, writeback=False):
            return torch.cat([p.detach().flatten() for p in model.parameters()]).clone()
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def both(*indices: int) -> list[tuple[int, int]]:
    """So many micro-batches of both ranks."""
    return [(rank, index) for rank in range(2) for index in indices]


def trained(*windows: list[tuple[int, int]]) -> torch.Tensor:
    """The parameters of `small_model` after these windows, in float64 on one process."""
    return values(train(small_model(), windows, window_mean)[1])


KINDS = [("NO_SHARD", "window"), ("FULL_SHARD", "window"), ("FULL_SHARD", "each"), ("SHARD_GRAD_OP", "each")]


def as_a_bystander(strategy: str, sync: str, use_orig_params: bool, evaluates: bool) -> None:
    """Another function's forward goes through a model in the middle of its window, as in a GAN.

    If it `evaluates`, a forward with gradients, which no backward follows, comes before.
    """
    critic, maker, rank = fsdp1(small_model(), strategy, use_orig_params), nn.Linear(3, 3).double(), dist.get_rank()
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (critic, maker)]

    @accumulating(steps=2, sync=sync)
    def step(critic, optimizer, x):
        return mean_loss(critic, x)

    @accumulating(steps=1)
    def through(maker, critic, optimizer, x):
        return mean_loss(critic, maker(x))

    for window in range(2):
        for index in (2 * window, 2 * window + 1):
            step(critic, optimizers[0], micro_batch(rank, index))
            if evaluates:
                critic(micro_batch(rank, 9))
            through(maker, critic, optimizers[1], micro_batch(rank, index))
    step(critic, optimizers[0], micro_batch(rank, 4))
    through(maker, critic, optimizers[1], micro_batch(rank, 4))
    step.flush()
    torch.testing.assert_close(values(critic), trained(both(0, 1), both(2, 3), both(4)), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("evaluates", [True, False])
@pytest.mark.parametrize("use_orig_params", [True, False])
@pytest.mark.parametrize(("strategy", "sync"), KINDS)
def test_what_is_held_stays_where_it_is_a_bystander(ranks, strategy, sync, use_orig_params, evaluates):
    ranks(2).run(as_a_bystander, strategy, sync, use_orig_params, evaluates)


class Twice(nn.Module):
    """It calls its block twice."""

    def __init__(self, wrap=lambda module: module):
        super().__init__()
        torch.manual_seed(5)
        self.block, self.head = nn.Linear(3, 3).double(), nn.Linear(3, 1).double()
        self.block = wrap(self.block)

    def forward(self, x):
        return self.head(torch.tanh(self.block(torch.tanh(self.block(x)))))


def as_a_bystander_twice(strategy: str, sync: str, use_orig_params: bool) -> None:
    rank = dist.get_rank()
    critic = fsdp1(Twice(lambda module: fsdp1(module, strategy, use_orig_params)), strategy, use_orig_params)
    maker = nn.Linear(3, 3).double()
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (critic, maker)]
    step = accumulating(steps=2, sync=sync)(lambda critic, optimizer, x: mean_loss(critic, x))
    through = accumulating(steps=2)(lambda maker, critic, optimizer, x: mean_loss(critic, maker(x)))
    for index in range(4):
        step(critic, optimizers[0], micro_batch(rank, index))
        through(maker, critic, optimizers[1], micro_batch(rank, index))
    expected = values(train(Twice(), [both(0, 1), both(2, 3)], window_mean)[1])
    torch.testing.assert_close(values(critic).sort().values, expected.sort().values, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("use_orig_params", [True, False])
@pytest.mark.parametrize(("strategy", "sync"), [*KINDS, ("NO_SHARD", "each"), ("SHARD_GRAD_OP", "window")])
def test_what_is_held_stays_where_a_bystanders_block_runs_twice(ranks, strategy, sync, use_orig_params):
    """Its second forward wrote zeros to what the first had kept."""
    ranks(2).run(as_a_bystander_twice, strategy, sync, use_orig_params)


def evaluated_in_a_window(strategy: str, sync: str, use_orig_params: bool) -> None:
    """An evaluation in the middle of a window gathers the parameters; then the window closes without a backward."""
    model, rank = fsdp1(small_model(), strategy, use_orig_params), dist.get_rank()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = accumulating(steps=3, sync=sync)(lambda model, optimizer, x: mean_loss(model, x))
    step(model, optimizer, micro_batch(rank, 0))
    with torch.no_grad():
        model(micro_batch(rank, 9))
    step.flush()
    bare = small_model()
    torch.nn.utils.vector_to_parameters(trained(both(0)), bare.parameters())
    with torch.no_grad():
        torch.testing.assert_close(model(micro_batch(0, 9)), bare(micro_batch(0, 9)), rtol=1e-9, atol=1e-12)
    for index in range(3):
        step(model, optimizer, micro_batch(rank, index))
    torch.testing.assert_close(values(model), trained(both(0), both(0, 1, 2)), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("use_orig_params", [True, False])
@pytest.mark.parametrize(("strategy", "sync"), [*KINDS, ("SHARD_GRAD_OP", "window")])
def test_a_forward_after_an_update_has_the_new_parameters(ranks, strategy, sync, use_orig_params):
    ranks(2).run(evaluated_in_a_window, strategy, sync, use_orig_params)


def norm_of_mixed(inner: str, outer: str, use_orig_params: bool) -> tuple[float, float]:
    """The norm before clipping, where some gradients are whole and others in pieces; and that of the whole model."""
    rank, model = dist.get_rank(), small_model()
    model[0] = fsdp1(model[0], inner, use_orig_params)
    home = fsdp1(model, outer, use_orig_params)
    optimizer = torch.optim.SGD(home.parameters(), lr=0.1)
    step = accumulating(steps=1, clip_norm=1e9)(lambda model, optimizer, x: mean_loss(model, x))
    step(home, optimizer, micro_batch(rank, 0))
    (gradients,), _ = train(small_model(), [both(0)], window_mean)
    return float(step.progress.grad_norm), float(torch.cat([one.flatten() for one in gradients]).norm())


@pytest.mark.parametrize("use_orig_params", [True, False])
@pytest.mark.parametrize(("inner", "outer"), [("NO_SHARD", "FULL_SHARD"), ("FULL_SHARD", "NO_SHARD")])
def test_the_norm_counts_whole_gradients_once(ranks, inner, outer, use_orig_params):
    for found, expected in ranks(2).run(norm_of_mixed, inner, outer, use_orig_params):
        assert found == pytest.approx(expected, rel=1e-9)


class Failing(nn.Module):
    """Fails in its forward, until it is told not to."""

    def __init__(self):
        super().__init__()
        self.inner = small_model()
        self.fails = True

    def forward(self, x):
        y = self.inner(x)
        if self.fails:
            raise ArithmeticError("the user's own")
        return y


def the_first_forward_fails(strategy: str) -> None:
    model, rank = Failing(), dist.get_rank()
    home = fsdp1(model, strategy)
    optimizer = torch.optim.SGD(home.parameters(), lr=0.1)
    step = accumulating(steps=1)(lambda model, optimizer, x: mean_loss(model, x))
    with pytest.raises(ArithmeticError, match="the user's own"):
        step(home, optimizer, micro_batch(rank, 0))
    model.fails = False
    step(home, optimizer, micro_batch(rank, 0))
    torch.testing.assert_close(values(home), trained(both(0)), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
def test_an_error_in_the_very_first_forward_is_the_users(ranks, strategy):
    ranks(2).run(the_first_forward_fails, strategy)


def frozen_after_an_exception(strategy: str, use_orig_params: bool) -> None:
    """The body fails behind the forward, whose backward never comes; then a layer is frozen."""
    rank, model, fails = dist.get_rank(), small_model(), [True]
    model[0] = fsdp1(model[0], strategy, use_orig_params)
    home = fsdp1(model, strategy, use_orig_params)
    optimizer = torch.optim.SGD(home.parameters(), lr=0.1)

    @accumulating(steps=1)
    def step(model, optimizer, x):
        loss = mean_loss(model, x)
        if fails:
            raise ArithmeticError
        return loss

    with pytest.raises(ArithmeticError):
        step(home, optimizer, micro_batch(rank, 0))
    fails.clear()
    model[0].requires_grad_(False)
    step(home, optimizer, micro_batch(rank, 0))
    bare = small_model()
    bare[0].requires_grad_(False)
    expected = values(train(bare, [both(0)], window_mean)[1])
    torch.testing.assert_close(values(home), expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("use_orig_params", [True, False])
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
def test_a_layer_is_frozen_after_an_exception(ranks, strategy, use_orig_params):
    ranks(2).run(frozen_after_an_exception, strategy, use_orig_params)
