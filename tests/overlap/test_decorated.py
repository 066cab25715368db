"""`accumulating(overlap=m)` on real ranks: after each update the parameters are those of the simulation in float64."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import gradsync
from tests.overlap.decorated import trained
from tests.overlap.loop import Plan, simulate
from tests.overlap.test_truth import even, far
from tests.support.models import WithBuffers
from tests.support.reference import micro_batch

UNEVEN = [
    ((3, 3), (3, 3), (1, 1)),
    ((3, 3), (2, 3), (0, 3), (0, 3), (0, 1)),
    ((3, 3, 3), (3, 0, 1), (2, 0, 0)),
]


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw", "foreach", "fused"])
@pytest.mark.parametrize("clip_norm", [None, 0.3])
def test_parameters_after_each_update_are_those_of_the_simulation(ranks, num_ranks, optimizer, clip_norm):
    """For every m from 1 to steps; on one rank it is the exact loop."""
    for m in (1, 2, 3):
        plan = Plan(even(num_ranks), m, optimizer, clip_norm)
        expected = simulate(plan if num_ranks > 1 else Plan(plan.counts, 0, optimizer, clip_norm))
        how = {1: "flush", 2: "known", 3: "unknown"}[m]
        for seen in ranks(num_ranks).run(trained, plan, how):
            assert far(seen, expected) < 1e-12


@pytest.mark.parametrize("counts", UNEVEN)
@pytest.mark.parametrize("sums", [False, True])
def test_tails_and_uneven_ranks(ranks, counts, sums):
    for m, optimizer in ((1, "sgd"), (2, "adamw"), (3, "sgd")):
        plan = Plan(counts, m, optimizer, 0.5, sums=sums)
        expected = simulate(plan)
        for how in ("known", "unknown"):
            for seen in ranks(len(counts[0])).run(trained, plan, how):
                assert far(seen, expected) < 1e-12


def test_sums_over_nothing_make_no_update_and_no_provisional_one(ranks):
    """A window whose counts add up to zero, and one in which they do on one rank."""
    plan = Plan(even(2, windows=5), 2, "adamw", 0.3, sums=True, weightless=(3, 4, 5), broken=((0, 9), (0, 10), (0, 11)))
    expected = simulate(plan)
    assert len(expected) == 4
    for seen in ranks(2).run(trained, plan):
        assert far(seen, expected) < 1e-12


def test_a_rank_may_land_alone(ranks):
    """It goes on from true parameters, and the others from provisional ones; what arrives is the same for all."""
    plan = Plan(even(3, windows=5), 3, "adamw", 0.3, alone=((0, 1, 1), (2, 2, 0), (1, 4, 2)))
    expected = simulate(plan)
    assert far(expected, simulate(Plan(plan.counts, 3, "adamw", 0.3))) > 1e-3
    for seen in ranks(3).run(trained, plan):
        assert far(seen, expected) < 1e-12


def buffers_after_a_flush(overlap: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rank 1 alone has had a micro-batch; the buffer, and its first row."""
    model = WithBuffers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = gradsync.accumulating(steps=2, model=model, optimizer=optimizer, overlap=overlap)(model.loss)
    x = micro_batch(1, 0)
    if dist.get_rank():
        step(x)
    step.flush()
    norm = torch.nn.BatchNorm1d(3).double()
    norm(x)
    return model.norm.running_mean, norm.running_mean


@pytest.mark.parametrize("overlap", [0, 1])
def test_the_buffers_at_a_flush_are_those_of_a_rank_that_had_a_micro_batch(ranks, overlap):
    for buffer, expected in ranks(2).run(buffers_after_a_flush, overlap):
        assert torch.equal(buffer, expected)


def void_behind_a_landing_that_raises() -> gradsync.Progress:
    model = torch.nn.Linear(3, 1).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def on_update(progress):
        raise ZeroDivisionError

    @gradsync.accumulating(steps=1, overlap=1, on_update=on_update)
    def step(model, optimizer, x, count):
        return gradsync.LossSum(model(x).square().sum(), count)

    x = torch.ones(2, 3, dtype=torch.float64)
    step(model, optimizer, x, 2)
    with pytest.raises(ZeroDivisionError):
        step(model, optimizer, x, 0)
    return step.progress


def test_a_window_without_an_update_counts_where_the_one_before_raises_as_it_lands(ranks):
    for progress in ranks(2).run(void_behind_a_landing_that_raises):
        assert (progress.window, progress.updates, progress.skipped) == (2, 1, 1)


def audited(overlap: int) -> tuple[int, int, int]:
    """An epoch whose last two windows are skipped, and a good one."""
    model = torch.nn.Linear(3, 1).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = gradsync.accumulating(steps=2, overlap=overlap, nonfinite="skip")(lambda m, o, x: m(x).square().mean())
    good = micro_batch(dist.get_rank(), 0)[:, :3]
    bad = torch.full_like(good, torch.nan)
    with gradsync.audit(model, optimizer) as report:
        for epoch in ([good] * 4 + [bad] * 4, [good] * 8):
            for x in step.over(epoch):
                step(model, optimizer, x)
    report.check()
    return report.syncs, report.updates, report.wasted


@pytest.mark.parametrize("overlap", [0, 1, 2])
def test_the_audit_finds_no_waste_in_windows_that_are_skipped_as_they_land(ranks, overlap):
    assert ranks(2).run(audited, overlap) == [(8, 6, 0)] * 2
