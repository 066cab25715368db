"""`progress.count` and `progress.global_loss`: what this rank's losses were sums over, and the mean over all ranks."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import gradsync
from gradsync import LossSum
from tests.support.models import small_model
from tests.support.reference import cut, mean_loss, micro_batch, sum_loss, train
from tests.support.traps import Trap
from tests.support.verdicts import ENGINES, FullRecorder, exact, items_of_rank, on_engine, verdict, verdicts

HOMES = [*((one, 2) for one in ENGINES), ("bare", 1), ("bare", 3)]
LENGTHS = {1: [5], 2: [5, 3], 3: [5, 2, 4]}
CLOSE = {"rel": 1e-12, "abs": 1e-14}


def closing(engine: str, looped: bool, sums: bool):
    """At each update: what progress says, against the same in float64 by hand."""
    rank, size = dist.get_rank(), dist.get_world_size()
    lengths = LENGTHS[size] if looped else [4] * size
    count = lambda r, i: 1 + (2 * r + i) % 5  # noqa: E731
    home = on_engine(small_model(), engine)
    optimizer = FullRecorder(home.parameters(), lr=0.1)
    said = []

    @gradsync.accumulating(steps=2, model=home, optimizer=optimizer, on_update=lambda progress: said.append(progress))
    def step(i, x):
        return LossSum(sum_loss(home, x), torch.tensor(count(rank, i))) if sums else mean_loss(home, x)

    def run():
        assert step.progress.global_loss is None, "nothing is closed yet"
        data = list(enumerate(items_of_rank(lengths)))
        for i, x in step.over(data) if looped else data:
            step(i, x)
        losses = []

        def whole(model, window):
            each = [(sum_loss if sums else mean_loss)(model, micro_batch(r, i)) for r, i in window]
            weights = [count(r, i) if sums else 1 for r, i in window]
            losses.append((sum(each) / sum(weights)).item())
            return sum(each) / sum(weights)

        windows = cut(lengths, 2)
        train(small_model(), windows, whole)
        assert len(said) == len(windows), "on_update is called on every rank after each update"
        for progress, loss, window in zip(said, losses, windows, strict=True):
            if looped or sums:
                assert float(progress.global_loss) == pytest.approx(loss, **CLOSE)
                assert not getattr(progress.global_loss, "requires_grad", False)
            elif size > 1:
                assert progress.global_loss is None, "no table travelled"
            if sums:
                assert float(progress.count) == sum(count(r, i) for r, i in window if r == rank)

    return verdict(run)


@pytest.mark.parametrize("sums", [True, False], ids=["LossSum", "mean"])
@pytest.mark.parametrize("looped", [True, False], ids=["over", "calls"])
@pytest.mark.parametrize(("engine", "size"), HOMES)
def test_what_progress_says_of_a_window(ranks, engine, size, looped, sums):
    """The count is this rank's, the loss is everybody's; a rank that has run out knows it too.

    Where no table travels (means, and no `.over`) `global_loss` is None on several ranks. On one rank, where the
    contract leaves it open, nothing is asked.
    """
    exact(verdicts(ranks(size), closing, engine, looped, sums))


def skipped_at_the_boundary():
    """Rank 0 skips its boundary's backward, and the window is dropped on all ranks."""
    rank, model = dist.get_rank(), small_model()
    optimizer = FullRecorder(model.parameters(), lr=0.1)

    @gradsync.accumulating(steps=2, skip=ArithmeticError)
    def step(model, optimizer, i):
        loss = 0.0 * mean_loss(model, micro_batch(rank, i)) + 10.0 * (rank + 1)
        return Trap.apply(loss, ArithmeticError()) if (rank, i) == (0, 1) else loss

    for i in range(2):
        step(model, optimizer, i)
    return float(step.progress.global_loss), step.progress.skipped


def test_the_mean_of_all_ranks_where_a_backward_was_skipped(ranks):
    """All ranks say the same of the window that they drop: the mean of 10, 10, 20, 20."""
    assert ranks(2).run(skipped_at_the_boundary) == [(15.0, 1), (15.0, 1)]


@pytest.mark.parametrize("dtype", [None, torch.int64])
def test_counts_of_integers_are_exact(dtype):
    """Integers stay integers: 2**53 + 3 is no float64."""
    model = small_model()
    optimizer = FullRecorder(model.parameters())
    values = [2**53, 1, 1, 1]
    step = gradsync.accumulating(steps=4)(
        lambda model, optimizer, x, n: LossSum(
            sum_loss(model, x), n if dtype is None else torch.tensor(n, dtype=dtype)
        )
    )
    for i, n in enumerate(values):
        step(model, optimizer, micro_batch(0, i), n)
    assert int(step.progress.count) == 2**53 + 3
    assert isinstance(step.progress.count, int)


def means_in_plain_calls(**settings) -> float:
    rank, model = dist.get_rank(), small_model()
    optimizer = FullRecorder(model.parameters(), lr=0.1)
    step = gradsync.accumulating(**settings)(lambda model, optimizer, i: 0.0 * mean_loss(model, micro_batch(rank, i)) + 10.0 * (rank + 1))
    for i in range(2):
        step(model, optimizer, i)
    return step.progress.global_loss


def by_a_function(_: int) -> int:
    return 2


@pytest.mark.parametrize("size", [1, 2])
def test_wherever_each_window_has_a_table_there_is_a_mean_of_all_ranks(ranks, size):
    mean = {1: 10.0, 2: 15.0}[size]
    assert ranks(size).run(means_with_skip) == [mean] * size
    assert ranks(size).run(means_with_a_function) == [mean] * size


def means_with_skip() -> float:
    return means_in_plain_calls(steps=2, skip=ArithmeticError)


def means_with_a_function() -> float:
    return means_in_plain_calls(steps=by_a_function)


def test_counts_of_zero_have_no_mean_and_a_record_can_be_hashed():
    model = small_model()
    step = gradsync.accumulating(steps=1)(lambda model, optimizer, x: LossSum(sum_loss(model, x), 0))
    step(model, FullRecorder(model.parameters()), micro_batch(0, 0))
    assert step.progress.loss is None and step.progress.global_loss is None
    assert hash(step.progress) == hash(step.progress)
