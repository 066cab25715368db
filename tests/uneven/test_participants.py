"""Ranks whose participants differ, or that do not know all of them: exact, or an error on every rank."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

import gradsync
from gradsync import functional as F
from tests.support.models import small_model
from tests.support.reference import mean_loss, micro_batch
from tests.support.verdicts import exact, refused, verdict, verdicts

STEP = torch.optim.lr_scheduler.ExponentialLR


def items_of(rank: int, num: int) -> list[torch.Tensor]:
    return [micro_batch(rank, i) for i in range(num)]


def not_known_on_rank_0(kind: str, flushed: bool):
    """Model and optimizer are named, so rank 0, without an item, makes the updates; what else is there, it has not seen."""
    rank, model = dist.get_rank(), small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    other = {"schedulers": STEP(optimizer, 0.5), "GradScaler": torch.amp.GradScaler("cpu", init_scale=1024.0)}[kind]
    step = gradsync.accumulating(steps=2, model=model, optimizer=optimizer)(lambda other, x: mean_loss(model, x))

    def run():
        items = items_of(rank, (1 if flushed else 3) if rank else 0)
        for x in items if flushed else step.over(items):
            step(other, x)
        step.flush()

    return verdict(run)


@pytest.mark.parametrize("flushed", [False, True])
@pytest.mark.parametrize("kind", ["schedulers", "GradScaler"])
def test_a_rank_without_an_item_that_does_not_know_all_participants(ranks, kind, flushed):
    refused(verdicts(ranks(2), not_known_on_rank_0, kind, flushed), f"same {kind}", "rank 0 has")


def named_by_a_function():
    rank, model = dist.get_rank(), small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = STEP(optimizer, 0.5)
    named = {"model": model, "optimizer": optimizer, "scheduler": lambda other, x: other}
    step = gradsync.accumulating(steps=2, **named)(lambda other, x: mean_loss(model, x))

    def run():
        for x in step.over(items_of(rank, 3 if rank else 0)):
            step(scheduler, x)

    return verdict(run)


def test_a_scheduler_that_a_function_of_the_call_names(ranks):
    """A rank without a call cannot ask that function."""
    refused(verdicts(ranks(2), named_by_a_function), "Every rank needs an item", "rank 0")


def of_other_kinds(optimizers: list, schedulers: list):
    rank, model = dist.get_rank(), small_model()
    optimizer = optimizers[rank](model.parameters(), lr=0.1)
    others = [make(optimizer, 0.5) for make in schedulers[rank]]
    step = gradsync.accumulating(steps=2)(lambda model, optimizer, x, *others: mean_loss(model, x))

    def run():
        for x in items_of(rank, 2):
            step(model, optimizer, x, *others)

    return verdict(run)


SGD, ADAM = torch.optim.SGD, torch.optim.Adam


@pytest.mark.parametrize(
    ("optimizers", "schedulers", "words"),
    [([SGD, ADAM], [[], []], "same optimizers"), ([SGD, SGD], [[], [STEP]], "same schedulers")],
)
def test_other_classes_on_other_ranks(ranks, optimizers, schedulers, words):
    """In plain calls too, at the first boundary: replicas would part."""
    refused(verdicts(ranks(2), of_other_kinds, optimizers, schedulers), words, "rank 1 has")


def in_another_order():
    """Two functions in one loop, with models of different sizes: their gradients must not meet."""
    rank = dist.get_rank()
    models = [nn.Linear(3, 2).double(), nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2)).double()]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    a, b = (gradsync.accumulating(steps=1)(lambda model, optimizer, x: model(x).square().mean()) for _ in models)

    def run():
        for i in a.over(b.over(range(3))):
            calls = [(a, models[0], optimizers[0]), (b, models[1], optimizers[1])]
            for step, model, optimizer in calls[::-1] if rank and i == 2 else calls:
                step(model, optimizer, torch.ones(2, 3, dtype=torch.float64))

    return verdict(run)


def test_two_functions_in_another_order_on_one_rank(ranks):
    refused(verdicts(ranks(2), in_another_order), "same order", "rank 0 is at number 2", "rank 1 is at number 1")


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 1)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        self.seen += x.sum()
        return self.linear(x)


def buffers_of_who_was_there():
    """Two calls an item: after its only item nobody knows whether rank 0 calls again. The second window is rank 1's."""
    model, seen = Counting(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = gradsync.accumulating(steps=2, on_update=lambda _: seen.append(model.seen.item()))(
        lambda model, optimizer, x: model(x).square().mean()
    )
    for x in step.over([torch.ones(1, 2)] * (1 + dist.get_rank())):
        step(model, optimizer, x)
        step(model, optimizer, x)
    return verdict(lambda: [None for _ in [0] if seen == [4.0, 8.0]][0])


def test_the_buffers_are_those_of_a_rank_that_was_there(ranks):
    exact(verdicts(ranks(2), buffers_of_who_was_there))


def four_dtypes():
    dtypes = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
    model = nn.ParameterList([nn.Parameter(torch.ones(2, dtype=dtype)) for dtype in dtypes])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = gradsync.accumulating(steps=1)(lambda model, optimizer: sum(one.double().sum() for one in model))
    return verdict(lambda: step(model, optimizer))


def test_parameters_of_four_dtypes(ranks):
    refused(verdicts(ranks(2), four_dtypes), "three of these dtypes", "DistributedDataParallel")


@pytest.mark.parametrize("kind", ["scheduler", "optimizer", "scaler"])
def test_another_one_than_the_one_that_is_named(kind):
    """It would never step, and nothing would say so. An empty tuple says that none takes part."""
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    one, another = {
        "scheduler": (STEP(optimizer, 0.5), STEP(optimizer, 0.5)),
        "optimizer": (optimizer, torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)),
        "scaler": (torch.amp.GradScaler("cpu"), torch.amp.GradScaler("cpu")),
    }[kind]
    step = gradsync.accumulating(steps=1, model=model, **{"optimizer": optimizer, kind: one})(
        lambda another, x: mean_loss(model, x)
    )
    with pytest.raises(gradsync.GradSyncError, match=f"{kind} .* came beside those that are named"):
        step(another, micro_batch(0, 0))
    if kind != "optimizer":
        step = gradsync.accumulating(steps=1, model=model, optimizer=optimizer, **{kind: ()})(
            lambda another, x: mean_loss(model, x)
        )
        step(another, micro_batch(0, 0))
        assert step.progress.updates == 1


def test_two_runs_share_a_scaler():
    """Its scale grows at each update of one, in the middle of the other's window: each gradient is 1 all the same."""
    scaler, seen = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1), []

    def front(name: str, steps: int):
        model = nn.Linear(1, 1, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        optimizer.register_step_pre_hook(lambda *_: seen.append(model.weight.grad.item()))
        run, who = F.Run(name, F.Terms(steps)), F.Who([model], [optimizer])

        def step():
            place = run.start(who)
            with run.holding(place):
                closing = run.backward(place, model(torch.ones(1, 1)).sum(), scaler=scaler)
            if closing is not None:
                F.update([optimizer], scaler=scaler, factor=closing.factor)
                run.close()

        return step, model, optimizer

    (one, *kept), (two, *kept_too) = front("one", 1), front("two", 2)
    for _ in range(4):
        one()
        two()
    assert seen == [1.0] * 6 and kept and kept_too
