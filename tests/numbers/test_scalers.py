"""A GradScaler that functions or optimizers share: an overflow of one is no error in another's numbers."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.amp import GradScaler

import gradsync
from tests.support.models import small_model
from tests.support.reference import cut, mean_loss, micro_batch, sum_loss, train, window_mean
from tests.support.verdicts import (
    NOT_SHARDED, FullRecorder, compare, exact, exact_or_refused, items_of_rank, on_engine, verdict, verdicts,
)  # fmt: skip

HOMES = [*((one, 2) for one in NOT_SHARDED), ("bare", 1), ("bare", 3)]


def shared_by_functions(engine: str, held: int):
    """`quiet` is in the middle of a window when `loud`, with the same scaler, overflows."""
    rank, size = dist.get_rank(), dist.get_world_size()
    scaler = GradScaler("cpu", init_scale=8.0, growth_interval=3)
    homes = [on_engine(small_model(), engine) for _ in range(2)]
    optimizers = [FullRecorder(home.parameters()) for home in homes]
    quiet = gradsync.accumulating(steps=4)(lambda model, optimizer, scaler, x: mean_loss(model, x))
    loud = gradsync.accumulating(steps=2)(
        lambda model, optimizer, scaler, x, factor: mean_loss(model, x) * factor
    )

    def run():
        for i in range(8):
            if i == held:
                for factor in (1.0, math.inf if rank == size - 1 else 1.0):
                    loud(homes[1], optimizers[1], scaler, micro_batch(rank, i), factor)
            quiet(homes[0], optimizers[0], scaler, micro_batch(rank, i))
        expected, _ = train(small_model(), cut([8] * size, 4), window_mean)
        compare(optimizers[0].seen, expected)
        assert quiet.progress.updates == 2, quiet.progress
        assert loud.progress.updates == 0 and not loud.progress.stepped, loud.progress
        assert loud.progress.skipped == 1, loud.progress
        assert not optimizers[1].seen, "the window that overflowed was stepped"

    return verdict(run)


@pytest.mark.parametrize("held", [1, 3, 5])
@pytest.mark.parametrize(("engine", "size"), HOMES)
def test_functions_that_share_a_scaler(ranks, engine, size, held):
    """What one function's overflow does to the scale is not in the other's open window, or it is an error."""
    exact_or_refused(verdicts(ranks(size), shared_by_functions, engine, held))


def growing_between(engine: str):
    """The scale grows (no overflow at all) while the other function's window is open."""
    rank, size = dist.get_rank(), dist.get_world_size()
    scaler = GradScaler("cpu", init_scale=8.0, growth_interval=1)
    homes = [on_engine(small_model(), engine) for _ in range(2)]
    optimizers = [FullRecorder(home.parameters()) for home in homes]
    slow = gradsync.accumulating(steps=4)(lambda model, optimizer, scaler, x: mean_loss(model, x))
    fast = gradsync.accumulating(steps=1)(lambda model, optimizer, scaler, x: mean_loss(model, x))

    def run():
        for i in range(8):
            for function, home, optimizer in zip((slow, fast), homes, optimizers, strict=True):
                function(home, optimizer, scaler, micro_batch(rank, i))
        for steps, optimizer in zip((4, 1), optimizers, strict=True):
            compare(optimizer.seen, train(small_model(), cut([8] * size, steps), window_mean)[0])

    return verdict(run)


@pytest.mark.parametrize(("engine", "size"), HOMES)
def test_a_scale_that_grows_in_the_middle_of_another_window(ranks, engine, size):
    exact_or_refused(verdicts(ranks(size), growing_between, engine))


class Halves(nn.Module):
    """Two parts, each with an optimizer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = small_model(), small_model()

    def forward(self, x, factor):
        return mean_loss(self.first, x) + mean_loss(self.second, x) * factor


def two_optimizers(engine: str, nonfinite: str):
    rank, size = dist.get_rank(), dist.get_world_size()
    model = Halves()
    home = on_engine(model, engine)
    optimizers = [FullRecorder(half.parameters()) for half in (model.first, model.second)]
    schedulers = [torch.optim.lr_scheduler.StepLR(one, 1, gamma=0.5) for one in optimizers]
    scaler = GradScaler("cpu", init_scale=8.0)
    step = gradsync.accumulating(steps=2, nonfinite=nonfinite)(
        lambda home, one, other, s1, s2, scaler, x, factor: home(x, factor)
    )

    def run():
        for i, factor in enumerate((1.0, math.inf if rank == size - 1 else 1.0, 1.0, 1.0)):
            step(home, *optimizers, *schedulers, scaler, micro_batch(rank, i), factor)
            if i == 1:
                middle, stepped = step.progress, [len(one.seen) for one in optimizers]
                rates = [one.param_groups[0]["lr"] for one in optimizers]
        said = (middle.updates, middle.skipped, middle.stepped)
        assert stepped[1] == 0, "the optimizer whose gradients are infinite was stepped"
        assert said == ((1, 0, True) if any(stepped) else (0, 1, False)), f"{stepped} optimizers stepped, but {said}"
        assert rates == [0.05 if one else 0.1 for one in stepped], f"{stepped} stepped, but the rates are {rates}"
        assert nonfinite == "step" or not any(stepped), "nonfinite='skip' skips the whole window"
        windows = cut([4] * size, 2)
        for optimizer in optimizers:
            expected, _ = train(small_model(), windows[2 - len(optimizer.seen) :], window_mean, lr=0.1)
            compare(optimizer.seen[:1], expected[:1])
        assert (step.progress.updates, step.progress.stepped) == (said[0] + 1, True)

    return verdict(run)


@pytest.mark.parametrize("nonfinite", ["step", "skip"])
@pytest.mark.parametrize(("engine", "size"), HOMES)
def test_two_optimizers_and_an_infinity_in_one(ranks, engine, size, nonfinite):
    """`progress` and the schedulers tell what happened: a window in which an optimizer stepped is an update.

    The contract is silent on whether the other one steps. torch's own recipe (`scaler.step` for each) steps it, and
    skipping both is right too; `nonfinite="skip"` skips the window.
    """
    exact_or_refused(verdicts(ranks(size), two_optimizers, engine, nonfinite))


def zero_counts(engine: str, every: bool):
    """A loop of the user's with a scaler, whose second window counts nothing, on every rank or on the last one."""
    rank, size = dist.get_rank(), dist.get_world_size()
    home = on_engine(small_model(), engine)
    optimizer = FullRecorder(home.parameters(), momentum=0.9, weight_decay=0.1)
    scaler = GradScaler("cpu", init_scale=8.0)
    count = lambda r, i: 0 if 2 <= i < 4 and (every or r == size - 1) else 3  # noqa: E731

    def run():
        before = None
        for step, (i, x) in gradsync.sync_every(home, 2, list(enumerate(items_of_rank([6] * size)))):
            if i == 2:
                before = [p.detach().clone() for p in home.parameters()]
            step.backward(scaler.scale(sum_loss(home, x)), count=count(rank, i))
            if step.last:
                assert step.empty == (i == 3 and (every or size == 1))
                if not step.empty:
                    scaler.step(optimizer)
                    scaler.update()
                optimizer.zero_grad()
            if i == 3 and every:
                assert all(torch.equal(p, q) for p, q in zip(home.parameters(), before)), "an update of nothing"
                assert scaler.get_scale() == 8.0, "the scale fell where nothing overflowed"
        whole = sum(count(r, i) for r in range(size) for i in (0, 1))
        expected = train(
            small_model(), [[(r, i) for r in range(size) for i in (0, 1)]],
            lambda model, window: sum(sum_loss(model, micro_batch(r, i)) for r, i in window) / whole,
        )[0]  # fmt: skip
        compare(optimizer.seen[:1], expected)

    return verdict(run)


@pytest.mark.parametrize("every", [True, False], ids=["on every rank", "on the last rank"])
@pytest.mark.parametrize(("engine", "size"), HOMES)
def test_a_window_of_zero_counts_with_a_scaler(ranks, engine, size, every):
    """`scaler.step` after a window that counted nothing makes no update, or the library says what to write instead.

    What a PyTorch user would expect: no update, and the loop goes on. torch's own words ("No inf checks were recorded
    for this optimizer") are neither.
    """
    (exact_or_refused if every or size == 1 else exact)(verdicts(ranks(size), zero_counts, engine, every))


def without_gradients(engine: str):
    """A window whose losses reach no parameter of the optimizer's, in the middle of a run with a scaler."""
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    home = on_engine(small_model(), engine)
    optimizer = FullRecorder(home.parameters())
    outside = torch.ones(3, dtype=torch.float64, requires_grad=True)
    scaler = GradScaler("cpu", init_scale=8.0)
    step = gradsync.accumulating(steps=2)(
        lambda model, optimizer, scaler, x, reaches: mean_loss(model, x) if reaches else (x * outside).sum()
    )

    def run():
        for i in range(6):
            step(home, optimizer, scaler, micro_batch(rank, i), i not in (2, 3))
        windows = cut([6] * size, 2)
        expected, _ = train(small_model(), [windows[0], windows[2]], window_mean)
        compare([optimizer.seen[0], optimizer.seen[-1]], expected)
        assert scaler.get_scale() == 8.0

    return verdict(run)


@pytest.mark.parametrize("size", [1, 2])
def test_a_window_without_gradients_with_a_scaler(ranks, size):
    """torch's own words in the window after it ("unscale_() has already been called") are neither."""
    if size == 1:
        assert without_gradients("bare").kind == "exact"
    else:
        exact(verdicts(ranks(size), without_gradients, "bare"))


@pytest.mark.parametrize("returned", [lambda loss: loss, lambda loss: gradsync.LossSum(loss, 4)], ids=["loss", "sum"])
def test_a_loss_that_the_scaler_has_scaled_already_is_refused(returned):
    """As tutorials on AMP write it: it would be scaled twice, and unscaled once."""
    model, scaler = torch.nn.Linear(3, 2), torch.amp.GradScaler("cpu", init_scale=4.0)

    @gradsync.accumulating(steps=2)
    def step(model, optimizer, scaler, x, scaled):
        loss = model(x).square().sum()
        return returned(scaler.scale(loss) if scaled else loss * torch.full((), 4.0))

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step(model, optimizer, scaler, torch.ones(4, 3), False)
    with pytest.raises(gradsync.GradSyncError, match="scaled by scaler.scale.* already. Return the loss itself"):
        step(model, optimizer, scaler, torch.ones(4, 3), True)


def test_a_scaler_that_nobody_else_refers_to_unscales_what_it_has_scaled():
    """Also at a flush, to which it does not come."""
    model = small_model()
    optimizer = FullRecorder(model.parameters())
    step = gradsync.accumulating(steps=3)(lambda model, optimizer, scaler, x: mean_loss(model, x))
    step(model, optimizer, GradScaler("cpu", init_scale=1024.0), micro_batch(0, 0))
    step.flush()
    compare(optimizer.seen, train(small_model(), cut([1], 3), window_mean)[0])
