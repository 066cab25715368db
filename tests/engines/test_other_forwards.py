"""Forwards beside those of the step that trains: bystanders, evaluations, somebody else's backward."""

from __future__ import annotations

import pytest
import torch

import gradsync
from tests.support.compare import assert_equal_states
from tests.support.homes import home_of
from tests.support.models import net
from tests.support.reference import mean_of
from tests.support.training import LR, Run, data, reference


def bystanders(engine: str) -> None:
    """A GAN whose halves are both on the engine: each half's window is as if the other half were frozen."""
    maker, critic = home_of(engine), home_of(engine)
    torch.manual_seed(0)
    optimizers = [torch.optim.SGD(one.model.parameters(), lr=LR, foreach=False) for one in (maker, critic)]

    @gradsync.accumulating(3)
    def train_maker(maker, critic, optimizer, index):
        return mean_of(critic(maker(data(rank, index))))

    @gradsync.accumulating(2)
    def train_critic(critic, maker, optimizer, index):
        with torch.no_grad():
            fake = maker(data(rank, index))
        return mean_of(critic(fake)) + mean_of(critic(data(rank, index + 50)))

    rank = maker.rank
    came = []
    for index in range(6):
        train_maker(maker.model, critic.model, optimizers[0], index)
        train_critic(critic.model, maker.model, optimizers[1], index)
        came += [maker.full(), critic.full()]

    halves = [net(), net()]
    plain = [torch.optim.SGD(one.parameters(), lr=LR) for one in halves]
    expected, losses = [], [[], []]
    for index in range(6):
        for who, size in ((0, 3), (1, 2)):
            for other in range(maker.size):
                x = data(other, index)
                if who == 0:
                    losses[0].append(torch.autograd.grad(mean_of(halves[1](halves[0](x))), list(halves[0].parameters())))
                else:
                    loss = mean_of(halves[1](halves[0](x).detach())) + mean_of(halves[1](data(other, index + 50)))
                    losses[1].append(torch.autograd.grad(loss, list(halves[1].parameters())))
            if index % size == size - 1:
                for p, *gradients in zip(halves[who].parameters(), *losses[who]):
                    p.grad = sum(gradients) / len(gradients)
                plain[who].step()
                plain[who].zero_grad()
                losses[who] = []
        expected += [{name: p.detach().clone() for name, p in half.named_parameters()} for half in halves]
    assert_equal_states(came, expected)


def a_forward_before_the_first_call(engine: str) -> None:
    """An evaluation leaves the root's parameters gathered; the optimizer's are still found."""
    home = home_of(engine)
    run = Run(home)
    with torch.no_grad():
        home.model(data(0, 0))
    run.over(5)
    with torch.no_grad():
        home.model(data(0, 0))
    assert_equal_states(run.states, reference(home, [range(3), range(3, 5)]))


FSDP2 = ["fsdp2", "fsdp2_gathered", "replicate_fsdp"]


@pytest.mark.parametrize("engine", ["bare", "ddp", "fsdp1_full", "fsdp1_full_orig", "fsdp1_grad_op", *FSDP2])
@pytest.mark.parametrize("case", [bystanders, a_forward_before_the_first_call])
def test_other_forwards(ranks, engine, case):
    """Of models that another step trains, and of evaluations."""
    ranks(2).run(case, engine)


def gradients_of_somebody_else(engine: str) -> None:
    """A backward of the user's own, before a window or in its body, is found also where `p.grad` does not show it."""
    home = home_of(engine)
    run = Run(home, loss=lambda y, index: (y.sum().backward(retain_graph=True), mean_of(y))[1])
    with pytest.raises(gradsync.GradSyncError, match="something ran backward"):
        run(0)
    run = Run(home)
    with gradsync.no_sync(home.model):
        mean_of(home.model(data(home.rank, 0))).backward()
    with pytest.raises(gradsync.GradSyncError, match=r"begin without gradients.*Call .*optimizer.zero_grad\(\)"):
        run(0)


@pytest.mark.parametrize("engine", ["ddp", "fsdp1_full", "fsdp1_full_orig", "fsdp1_no_shard", *FSDP2])
def test_gradients_of_somebody_else(ranks, engine):
    """Are an error, wherever the engine keeps them."""
    ranks(2).run(gradients_of_somebody_else, engine)
