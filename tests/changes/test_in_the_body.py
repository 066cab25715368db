"""What a body changes between the start of its call and the backward: an error on every rank, in held places and last ones."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import parametrizations

import gradsync
from tests.support.models import small_model
from tests.support.reference import mean_loss, micro_batch
from tests.support.verdicts import FullRecorder, on_engine, refused, verdict, verdicts

STEPS = 2


def head(inner: nn.Module, optimizer) -> None:
    layer = nn.Linear(2, 2).double()
    inner.add_module("new", layer)
    optimizer.add_param_group({"params": list(layer.parameters())})


def replaced(inner: nn.Module, optimizer) -> None:
    first = next(one for one in inner.modules() if isinstance(one, nn.Linear))
    first.weight = nn.Parameter(first.weight.detach().clone())
    optimizer.add_param_group({"params": [first.weight]})


def parametrised(inner: nn.Module, optimizer) -> None:
    parametrizations.weight_norm(next(one for one in inner.modules() if isinstance(one, nn.Linear)))


def frozen(inner: nn.Module, optimizer) -> None:
    next(inner.parameters()).requires_grad_(False)


def unfrozen(inner: nn.Module, optimizer) -> None:
    inner.requires_grad_(True)


def edited_in_the_body(engine: str, how: str, edit, steps: int, index: int, partly: bool):
    """The edit comes in the body of the second window's micro-batch `index`, before the forward."""
    rank, inner = dist.get_rank(), small_model(unused=False)
    home = on_engine(inner, engine)
    optimizer = FullRecorder(home.parameters(), lr=0.1)
    if edit is unfrozen:
        for parameter in list(inner.parameters())[: 1 if partly else None]:
            parameter.requires_grad_(False)

    def body(i: int) -> torch.Tensor:
        if i == steps + index:
            edit(inner, optimizer)
        loss = mean_loss(home, micro_batch(rank, i))
        return loss if loss.requires_grad else loss + 0.0 * torch.ones((), requires_grad=True)

    def run() -> None:
        if how == "accumulating":
            step = gradsync.accumulating(steps=steps, model=home, optimizer=optimizer)(body)
            for i in range(2 * steps):
                step(i)
            return
        for step, i in gradsync.sync_every(home, steps, range(2 * steps)):
            if how == "plain":
                body(i).backward()
            else:
                step.backward(body(i))
            if step.last:
                optimizer.step()
                optimizer.zero_grad()

    return verdict(run)


PLACES = [(1, 0), (STEPS, 0), (STEPS, 1)]


@pytest.mark.parametrize(("steps", "index"), PLACES)
@pytest.mark.parametrize("how", ["accumulating", "sync_every"])
@pytest.mark.parametrize("engine", ["bare", "find_unused"])
@pytest.mark.parametrize("edit", [head, replaced, parametrised, frozen], ids=lambda one: one.__name__)
def test_an_edit_in_the_body(ranks, edit, engine, how, steps, index):
    if edit is not frozen and index + 1 < steps:
        index = 0  # it is seen at the boundary
    refused(verdicts(ranks(2), edited_in_the_body, engine, how, edit, steps, index, False), "must stay the same|no longer have|steps 2 others")


@pytest.mark.parametrize(("steps", "index"), PLACES)
@pytest.mark.parametrize(("how", "partly"), [("accumulating", True), ("accumulating", False), ("sync_every", True),
                                             ("sync_every", False), ("plain", True)])  # fmt: skip
@pytest.mark.parametrize("engine", ["bare", "find_unused"])
def test_a_layer_unfrozen_in_the_body(ranks, engine, how, steps, index, partly):
    """Off as each window opens, on in the body: its gradients would stay on their rank."""
    said = verdicts(ranks(2), edited_in_the_body, engine, how, unfrozen, steps, index, partly)
    refused(said, "must stay the same", "not in the body")


def toggled(how: str, steps: int):
    """pix2pix: each half is switched on in the body that trains it."""
    rank, g, d = dist.get_rank(), nn.Linear(3, 3).double(), small_model(unused=False)
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (g, d)]

    def of_d(x: torch.Tensor) -> torch.Tensor:
        d.requires_grad_(True)
        return mean_loss(d, g(x).detach())

    def of_g(x: torch.Tensor) -> torch.Tensor:
        d.requires_grad_(False)
        return mean_loss(d, g(x))

    def run() -> None:
        data = [micro_batch(rank, i) for i in range(2 * steps)]
        if how == "accumulating":
            pairs = ((d, optimizers[1], of_d), (g, optimizers[0], of_g))
            both = [gradsync.accumulating(steps=steps, model=m, optimizer=o)(body) for m, o, body in pairs]
            for x in data:
                for step in both:
                    step(x)
            return
        for (first, x), (second, _) in zip(gradsync.sync_every(d, steps, data), gradsync.sync_every(g, steps, data), strict=True):
            for step, body, optimizer in ((first, of_d, optimizers[1]), (second, of_g, optimizers[0])):
                step.backward(body(x))
                if step.last:
                    optimizer.step()
                    optimizer.zero_grad()

    return verdict(run)


@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize("how", ["accumulating", "sync_every"])
def test_halves_that_are_switched_in_the_bodies(ranks, how, steps):
    refused(verdicts(ranks(2), toggled, how, steps), "must stay the same", "not in the body")
