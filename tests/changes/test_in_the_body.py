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


def by_function(home, optimizer, body, steps: int) -> None:
    step = gradsync.accumulating(steps=steps, model=home, optimizer=optimizer)(body)
    for i in range(2 * steps):
        step(i)


def by_iterator(home, optimizer, body, steps: int, backward=lambda step, loss: step.backward(loss)) -> None:
    for step, i in gradsync.sync_every(home, steps, range(2 * steps)):
        backward(step, body(i))
        if step.last:
            optimizer.step()
            optimizer.zero_grad()


def by_plain_backward(home, optimizer, body, steps: int) -> None:
    by_iterator(home, optimizer, body, steps, lambda _, loss: loss.backward())


def edited_in_the_body(engine: str, train, edit, steps: int, index: int, partly: bool):
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

    return verdict(lambda: train(home, optimizer, body, steps))


PLACES = [(1, 0), (STEPS, 0), (STEPS, 1)]


@pytest.mark.parametrize(("steps", "index"), PLACES)
@pytest.mark.parametrize("train", [by_function, by_iterator])
@pytest.mark.parametrize("engine", ["bare", "find_unused"])
@pytest.mark.parametrize("edit", [head, replaced, parametrised, frozen], ids=lambda one: one.__name__)
def test_an_edit_in_the_body(ranks, edit, engine, train, steps, index):
    if edit is not frozen and index + 1 < steps:
        index = 0  # it is seen at the boundary
    said = verdicts(ranks(2), edited_in_the_body, engine, train, edit, steps, index, False)
    refused(said, "must stay the same|no longer have|steps 2 others")


@pytest.mark.parametrize(("steps", "index"), PLACES)
@pytest.mark.parametrize(("train", "partly"), [(by_function, True), (by_function, False), (by_iterator, True),
                                               (by_iterator, False), (by_plain_backward, True)])  # fmt: skip
@pytest.mark.parametrize("engine", ["bare", "find_unused"])
def test_a_layer_unfrozen_in_the_body(ranks, engine, train, steps, index, partly):
    """Off as each window opens, on in the body: its gradients would stay on their rank."""
    said = verdicts(ranks(2), edited_in_the_body, engine, train, unfrozen, steps, index, partly)
    refused(said, "must stay the same", "not in the body")


def both_by_functions(halves, steps: int, data: list) -> None:
    both = [gradsync.accumulating(steps=steps, model=m, optimizer=o)(body) for m, o, body in halves]
    for x in data:
        for step in both:
            step(x)


def both_by_iterators(halves, steps: int, data: list) -> None:
    for pairs in zip(*(gradsync.sync_every(model, steps, data) for model, _, _ in halves), strict=True):
        for (step, x), (_, optimizer, body) in zip(pairs, halves):
            step.backward(body(x))
            if step.last:
                optimizer.step()
                optimizer.zero_grad()


def toggled(train, steps: int):
    """pix2pix: each half is switched on in the body that trains it."""
    rank, g, d = dist.get_rank(), nn.Linear(3, 3).double(), small_model(unused=False)

    def of_d(x: torch.Tensor) -> torch.Tensor:
        d.requires_grad_(True)
        return mean_loss(d, g(x).detach())

    def of_g(x: torch.Tensor) -> torch.Tensor:
        d.requires_grad_(False)
        return mean_loss(d, g(x))

    halves = [(m, torch.optim.SGD(m.parameters(), lr=0.1), body) for m, body in ((d, of_d), (g, of_g))]
    return verdict(lambda: train(halves, steps, [micro_batch(rank, i) for i in range(2 * steps)]))


@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize("train", [both_by_functions, both_by_iterators])
def test_halves_that_are_switched_in_the_bodies(ranks, train, steps):
    refused(verdicts(ranks(2), toggled, train, steps), "must stay the same", "not in the body")
