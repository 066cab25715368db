"""What a step function returns, raises and is made of in the first hour: exact, or an error on every rank."""

from __future__ import annotations

import gc
import threading
from collections import namedtuple

import pytest
import torch
import torch.distributed as dist
from torch import nn

import gradsync
from gradsync import GradSyncError, LossSum, accumulating
from gradsync._state import STEP_WATCHERS
from tests.support.models import small_model
from tests.support.reference import cut, mean_loss, micro_batch, train, window_mean
from tests.support.verdicts import (
    NOT_SHARDED, FullRecorder, compare, exact, exact_or_refused, items_of_rank, on_engine, refused, verdict, verdicts,
)  # fmt: skip

HOMES = [*((one, 2) for one in NOT_SHARDED), ("bare", 1), ("bare", 3)]
FEW = [("bare", 1), ("bare", 2), ("ddp", 2)]
Pair = namedtuple("Pair", ["first", "second"])


def returning(engine: str, make, how: str = "over", **settings):
    """One loop whose function returns `make(model, x)`."""
    size = dist.get_world_size()
    home = on_engine(small_model(), engine)
    optimizer = FullRecorder(home.parameters())
    step = accumulating(steps=2, **settings)(lambda model, optimizer, x: make(model, x))

    def run():
        data = items_of_rank([4] * size)
        for x in step.over(data) if how == "over" else data:
            step(home, optimizer, x)
        compare(optimizer.seen, train(small_model(), cut([4] * size, 2), window_mean)[0])

    return verdict(run)


# -- several losses -------------------------------------------------------------------------------------------------

TWO = {
    "tuple": lambda model, x: (mean_loss(model, x), model(x).square().sum()),
    "list": lambda model, x: [mean_loss(model, x), model(x).square().sum()],
    "namedtuple": lambda model, x: Pair(mean_loss(model, x), model(x).square().sum()),
    "three": lambda model, x: (mean_loss(model, x), model(x).square().sum(), model(x).sum()),
    "LossSums": lambda model, x: (LossSum(mean_loss(model, x), 1), LossSum(model(x).square().sum(), 2)),
}
ONE = {
    "logits": lambda model, x: (mean_loss(model, x), model(x)),
    "a detached loss": lambda model, x: (mean_loss(model, x), model(x).square().sum().detach()),
    "a number": lambda model, x: (mean_loss(model, x), 3.0),
    "a dict": lambda model, x: (mean_loss(model, x), {"aux": model(x).sum()}),
    "a namedtuple": lambda model, x: Pair(mean_loss(model, x), model(x)),
    "alone": lambda model, x: (mean_loss(model, x),),
}


def two_losses(engine: str, kind: str):
    return returning(engine, TWO[kind])


def one_loss(engine: str, kind: str):
    return returning(engine, ONE[kind])


@pytest.mark.parametrize("kind", TWO)
@pytest.mark.parametrize(("engine", "size"), FEW)
def test_two_losses(ranks, engine, size, kind):
    """A second scalar that needs a gradient would be dropped in silence: add them, or detach what is for the log.

    The contract is silent on LossSum there; nobody expects it to be dropped either.
    """
    refused(verdicts(ranks(size), two_losses, engine, kind), "add|sum|+", "second|two|several", "detach")


@pytest.mark.parametrize("kind", ONE)
@pytest.mark.parametrize(("engine", "size"), FEW)
def test_a_loss_and_something_else(ranks, engine, size, kind):
    exact(verdicts(ranks(size), one_loss, engine, kind))


# -- losses that are none -------------------------------------------------------------------------------------------


def complex_loss(engine: str, how: str):
    make = lambda model, x: mean_loss(model, x) * (1 + 1j)  # noqa: E731
    if how != "sync_every":
        return returning(engine, make, how)
    home = on_engine(small_model(), engine)

    def run():
        for step, x in gradsync.sync_every(home, 2, items_of_rank([4] * dist.get_world_size())):
            step.backward(make(home, x))

    return verdict(run)


@pytest.mark.parametrize("how", ["over", "calls", "sync_every"])
@pytest.mark.parametrize(("engine", "size"), FEW)
def test_a_complex_loss(ranks, engine, size, how):
    """There is no smaller of two complex numbers: take its absolute value, or its real part."""
    refused(verdicts(ranks(size), complex_loss, engine, how), "complex", "real|abs")


class Scale(nn.Module):
    """A parameter that is a loss by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.s = nn.Parameter(torch.tensor(2.0, dtype=torch.float64))

    def forward(self, x):
        return self.s * x.mean()


def itself(engine: str, form: str):
    model = Scale()
    home = on_engine(model, engine)
    optimizer = FullRecorder(model.parameters(), lr=0.5)
    forms = {"itself": lambda s: s, "a view": lambda s: s.view(()), "in a dict": lambda s: {"loss": s}}
    step = accumulating(steps=2)(lambda model, optimizer, x: forms[form](getattr(model, "module", model).s))
    parameter = model.s

    def run():
        try:
            for x in step.over(items_of_rank([4] * dist.get_world_size())):
                step(home, optimizer, x)
            compare(optimizer.seen, [[torch.tensor(1.0, dtype=torch.float64)]] * 2)
            assert model.s.item() == 1.0
        finally:
            assert model.s is parameter and parameter.is_leaf, "the parameter is another one"
            assert parameter.requires_grad, "the parameter came back without requires_grad"

    return verdict(run)


@pytest.mark.parametrize("form", ["itself", "a view", "in a dict"])
@pytest.mark.parametrize(("engine", "size"), FEW)
def test_a_parameter_is_the_loss(ranks, engine, size, form):
    """What comes back is detached; the model's own parameter is not. The contract leaves whether it is an error."""
    exact_or_refused(verdicts(ranks(size), itself, engine, form))


# -- skip -----------------------------------------------------------------------------------------------------------


def no_grad(model, x):
    return mean_loss(model, x).detach()


def own_backward(model, x):
    mean_loss(model, x).backward()
    return mean_loss(model, x)


MISUSE = {
    "a loss without a gradient": no_grad,
    "no loss": lambda model, x: None,
    "a vector": lambda model, x: model(x),
    "a complex loss": lambda model, x: mean_loss(model, x) * 1j,
    "two losses": TWO["tuple"],
    "its own backward": own_backward,
}


def skipped(engine: str, kind: str, skip: str):
    types = {"RuntimeError": (RuntimeError,), "Exception": Exception, "GradSyncError": (GradSyncError, KeyError)}
    return returning(engine, MISUSE[kind], skip=types[skip])


@pytest.mark.parametrize("skip", ["RuntimeError", "Exception", "GradSyncError"])
@pytest.mark.parametrize("kind", MISUSE)
@pytest.mark.parametrize(("engine", "size"), FEW)
def test_skip_never_swallows_misuse(ranks, engine, size, kind, skip):
    """`skip=(RuntimeError,)` is the idiom for out of memory; GradSyncError is a RuntimeError, and is raised."""
    refused(verdicts(ranks(size), skipped, engine, kind, skip))


def out_of_memory(engine: str, bad):
    rank, size = dist.get_rank(), dist.get_world_size()
    home = on_engine(small_model(), engine)
    optimizer = FullRecorder(home.parameters())

    @accumulating(steps=2, skip=(RuntimeError,))
    def step(model, optimizer, i):
        if (rank, i) in bad:
            raise torch.OutOfMemoryError("tried to allocate")
        return mean_loss(model, micro_batch(rank, i))

    def run():
        for i in step.over(range(4)):
            step(home, optimizer, i)
        windows = [[one for one in window if one not in bad] for window in cut([4] * size, 2)]
        compare(optimizer.seen, train(small_model(), [one for one in windows if one], window_mean)[0])
        assert step.progress.dropped == sum(r == rank for r, _ in bad)

    return verdict(run)


@pytest.mark.parametrize("bad", [((0, 1),), ((0, 0), (0, 1)), ((0, 3),)], ids=str)
@pytest.mark.parametrize(("engine", "size"), HOMES)
def test_what_skip_is_for(ranks, engine, size, bad):
    """What the body raises itself is dropped, on that rank alone, the boundary included."""
    exact(verdicts(ranks(size), out_of_memory, engine, bad))


# -- schedulers -----------------------------------------------------------------------------------------------------


class Raising(torch.optim.lr_scheduler.LambdaLR):
    """Its second step raises: a schedule with a bug, or one that has ended (OneCycleLR)."""

    def step(self, *args):
        if getattr(self, "last_epoch", -1) >= 1:
            raise ValueError("Tried to step 2 times")
        super().step(*args)


def raising(engine: str, skip: bool):
    rank, size = dist.get_rank(), dist.get_world_size()
    home = on_engine(small_model(), engine)
    optimizer = FullRecorder(home.parameters())
    scheduler = Raising(optimizer, lambda epoch: 1.0)
    step = accumulating(steps=2, skip=(ValueError,) if skip else ())(
        lambda model, optimizer, scheduler, x: mean_loss(model, x)
    )

    def run():
        raised = []
        for i in range(4):
            try:
                step(home, optimizer, scheduler, micro_batch(rank, i))
            except ValueError as error:
                assert "Tried to step" in str(error), error
                raised.append(i)
        assert raised == [3], f"it raised at {raised}"
        progress = step.progress
        assert (progress.updates, progress.skipped, progress.dropped) == (2, 0, 0), progress
        assert (progress.window, progress.index) == (2, 0), progress
        compare(optimizer.seen, train(small_model(), cut([4] * size, 2), window_mean)[0])
        assert all(p.grad is None for p in home.parameters()), "its gradients are left"

    return verdict(run)


@pytest.mark.parametrize("skip", [False, True], ids=["", "skip"])
@pytest.mark.parametrize(("engine", "size"), FEW)
def test_a_scheduler_that_raises(ranks, engine, size, skip):
    """The optimizer has stepped: that is an update, not a skipped window; the error goes on to the caller."""
    exact(verdicts(ranks(size), raising, engine, skip))


# -- models ---------------------------------------------------------------------------------------------------------


def lazy(engine: str, dry: bool):
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(11)
    model = nn.Sequential(nn.LazyLinear(5), nn.Tanh(), nn.LazyLinear(2)).double()
    optimizer = FullRecorder(model.parameters())
    step = accumulating(steps=2)(lambda model, optimizer, x: mean_loss(model, x))
    torch.manual_seed(5)
    if dry:
        model(micro_batch(0, 0))
        model = on_engine(model, engine)
    twin = nn.Sequential(nn.LazyLinear(5), nn.Tanh(), nn.LazyLinear(2)).double()
    torch.manual_seed(5)
    twin(micro_batch(0, 0))
    torch.manual_seed(5)  # for a first forward in the run

    def run():
        for x in step.over(items_of_rank([4] * size)):
            step(model, optimizer, x)
        compare(optimizer.seen, train(twin, cut([4] * size, 2), window_mean)[0])

    try:
        return verdict(run)
    finally:
        step.reset()


@pytest.mark.parametrize("dry", [False, True], ids=["as it is", "after a forward"])
@pytest.mark.parametrize(("engine", "size"), [("bare", 1), ("bare", 2), ("bare", 3)])
def test_lazy_layers(ranks, engine, size, dry):
    """A parameter without a shape cannot be synchronised: an error on every rank; after a forward, and on one, exact."""
    said = verdicts(ranks(size), lazy, engine, dry)
    exact(said) if dry or size == 1 else refused(said, "one of a lazy module has no shape yet")


def shared_bystander(engine: str):
    """Two threads train against one frozen half; the first is done while the second is in its forward."""
    frozen = small_model()
    frozen[0].bias.requires_grad_(False)
    before = [p.requires_grad for p in frozen.parameters()]
    inside, done = threading.Barrier(2), threading.Event()
    errors, seen = [], []

    def work(second: bool):
        torch.manual_seed(1)
        own = nn.Linear(3, 3).double()
        optimizer = FullRecorder(own.parameters())

        @accumulating(steps=1)
        def step(own, frozen, optimizer, x):
            if not second:
                inside.wait(10)
                return mean_loss(frozen, own(x))
            y = own(x)
            inside.wait(10)
            done.wait(10)
            return mean_loss(frozen, y)

        try:
            step(own, frozen, optimizer, micro_batch(0, 0))
        except BaseException as error:
            errors.append(error)
        finally:
            done.set()
        seen.append(optimizer.seen)

    def run():
        threads = [threading.Thread(target=work, args=(second,)) for second in (False, True)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [p.requires_grad for p in frozen.parameters()] == before, "requires_grad is not restored"
        assert all(p.grad is None for p in frozen.parameters()), "the frozen half has gradients"
        if errors:
            raise errors[0]
        assert [len(one) for one in seen] == [1, 1]

    return verdict(run)


def test_a_frozen_half_of_two_threads(ranks):
    """A bystander that two threads share ends without gradients, and with the requires_grad it had."""
    exact_or_refused(verdicts(ranks(1), shared_bystander, "bare"))


@pytest.mark.parametrize("given", [1.0, None, (1.0, 2.0)])
def test_what_is_no_tensor_is_no_loss_for_a_micro_step(given):
    model = small_model()
    with pytest.raises(GradSyncError, match="The loss must be a tensor, but it is of type"):
        for step in gradsync.sync_every(model, 2):
            step.backward(given)


def test_options_that_would_never_do_what_they_say():
    """A class in place of an object, a function that is never awaited, a function that is decorated twice."""
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    async def later(progress): ...

    def generator(progress):
        yield

    for on_update in (later, generator):
        with pytest.raises(TypeError, match="on_update must be a plain function"):
            accumulating(2, on_update=on_update)(mean_loss)
    step = accumulating(2, model=nn.Linear, optimizer=optimizer)(lambda x: mean_loss(model, x))
    with pytest.raises(TypeError, match="got the class Linear"):
        step(micro_batch(0, 0))
    with pytest.raises(TypeError, match="decorates a step function once"):
        accumulating(2)(accumulating(2)(mean_loss))


def test_watchers_of_steps_that_are_gone_leave_nothing():
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = len(STEP_WATCHERS)
    for _ in range(20):
        accumulating(1)(lambda model, optimizer, x: mean_loss(model, x))(model, optimizer, micro_batch(0, 0))
    gc.collect()
    assert len(STEP_WATCHERS) <= before + 1
