"""What happens at the boundary, in its order: unscale, check, clip, step, schedule."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

import gradsync
from gradsync import GradSyncError, accumulating
from tests.support.compare import assert_equal_updates
from tests.support.models import small_model
from tests.support.recorder import Recorder
from tests.support.reference import cut, mean_loss, micro_batch, train, window_mean


def test_the_scheduler_steps_once_a_window():
    step = accumulating(steps=3)(lambda model, optimizer, scheduler, x: mean_loss(model, x))
    model = small_model()
    optimizer = Recorder(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    for i in step.over(range(7)):
        step(model, optimizer, scheduler, micro_batch(0, i))
    assert optimizer.param_groups[0]["lr"] == 0.1 * 0.5**3


@pytest.mark.parametrize("fused", [False, True])
def test_a_scaler_skips_a_window_with_an_inf_and_the_scheduler_waits(fused):
    model = small_model(torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=fused)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)

    @accumulating(steps=2)
    def step(model, optimizer, scheduler, scaler, x, factor):
        return mean_loss(model, x) * factor

    before = copy.deepcopy(model.state_dict())
    for i, factor in enumerate([1.0, float("inf")]):
        step(model, optimizer, scheduler, scaler, micro_batch(0, i, dtype=torch.float32), factor)
    assert all(torch.equal(a, b) for a, b in zip(before.values(), model.state_dict().values(), strict=True))
    assert not step.progress.stepped and step.progress.skipped == 1 and step.progress.updates == 0
    assert optimizer.param_groups[0]["lr"] == 0.1 and scaler.get_scale() == 512.0
    for i in range(2):
        step(model, optimizer, scheduler, scaler, micro_batch(0, i, dtype=torch.float32), 1.0)
    assert step.progress.stepped and step.progress.updates == 1
    assert optimizer.param_groups[0]["lr"] == 0.05
    _, expected = train(small_model(torch.float32), cut([2], 2), lambda m, w: sum(
        mean_loss(m, micro_batch(0, i, dtype=torch.float32)) for _, i in w) / len(w))
    for p, q in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(p, q)


def test_amp_clips_what_is_unscaled():
    model = small_model()
    optimizer = Recorder(model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
    step = accumulating(steps=2, clip_norm=0.01)(lambda model, optimizer, scaler, x: mean_loss(model, x))
    for i in range(2):
        step(model, optimizer, scaler, micro_batch(0, i))
    (expected,), _ = train(small_model(), cut([2], 2), window_mean)
    norm = torch.cat([g.flatten() for g in expected]).norm()
    assert step.progress.grad_norm.item() == pytest.approx(norm.item(), rel=1e-6)
    assert_equal_updates(optimizer.seen, [[g * (0.01 / (norm + 1e-6)) for g in expected]], 1e-6)


@pytest.mark.parametrize("nonfinite", ["step", "skip", "raise"])
@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_nonfinite(nonfinite, poison):
    step = accumulating(steps=2, nonfinite=nonfinite)(lambda model, optimizer, x, f: mean_loss(model, x) * f)
    model = small_model()
    optimizer = Recorder(model.parameters(), momentum=0.9)
    step(model, optimizer, micro_batch(0, 0), 1.0)
    if nonfinite == "raise":
        with pytest.raises(GradSyncError, match="must be finite under nonfinite='raise'"):
            step(model, optimizer, micro_batch(0, 1), poison)
    else:
        step(model, optimizer, micro_batch(0, 1), poison)
    finite = all(p.isfinite().all() for p in model.parameters())
    assert finite == (nonfinite != "step")
    assert all(p.grad is None for p in model.parameters())
    if finite:
        assert not optimizer.state and step.progress.skipped == 1
        for i in range(2):
            step(model, optimizer, micro_batch(0, i), 1.0)
        assert_equal_updates(optimizer.seen, train(small_model(), cut([2], 2), window_mean)[0])


def an_inf_on_one_rank() -> None:
    """Every rank skips, no scheduler moves, and the next window is right."""
    rank = dist.get_rank()
    for wrap in (lambda m: m, DDP):
        model = small_model()
        home = wrap(model)
        optimizer = Recorder(model.parameters())
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
        step = accumulating(steps=2)(lambda model, optimizer, sched, scaler, x, f: mean_loss(model, x) * f)
        for i in range(4):
            poison = float("inf") if (rank == 1 and i == 0) else 1.0
            step(home, optimizer, scheduler, scaler, micro_batch(rank, i % 2), poison)
            if i == 1:
                assert step.progress.skipped == 1 and not step.progress.stepped
                assert optimizer.param_groups[0]["lr"] == 0.1 and scaler.get_scale() == 128.0
        expected, _ = train(small_model(), cut([2, 2], 2), window_mean)
        assert_equal_updates(optimizer.seen, expected)


def test_an_inf_on_one_rank(ranks):
    ranks(2).run(an_inf_on_one_rank)


def nonfinite_on_one_rank(policy: str) -> list:
    rank = dist.get_rank()
    model = small_model()
    optimizer = Recorder(model.parameters(), momentum=0.9)
    step = accumulating(steps=2, nonfinite=policy)(lambda model, optimizer, x, f: mean_loss(model, x) * f)
    said = []
    for i in range(4):
        try:
            step(model, optimizer, micro_batch(rank, i % 2), float("nan") if rank == 1 and i == 0 else 1.0)
        except gradsync.GradSyncError as error:
            said.append(str(error))
    expected, _ = train(small_model(), cut([2, 2], 2), window_mean)
    assert_equal_updates(optimizer.seen, expected)
    return said


@pytest.mark.parametrize("policy", ["skip", "raise"])
def test_nonfinite_acts_on_every_rank_alike(ranks, policy):
    said = ranks(2).run(nonfinite_on_one_rank, policy)
    assert [len(one) for one in said] == ([1, 1] if policy == "raise" else [0, 0])
