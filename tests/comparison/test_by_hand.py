"""What users run into in the loops that everybody writes, each row beside such a loop.

The rows are named by what goes wrong there. Where a row is the subject of another file, that file has it:
the bypassed wrapper, static graphs (engines/test_ddp_models.py); a body that steps or zeroes by itself, steps that have
no effect (decorator/test_errors_in_windows.py); AMP and clipping, a changing N, what is logged (decorator/).
"""

from __future__ import annotations

import contextlib
import copy

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

from gradsync import LossSum, accumulating
from tests.support.compare import assert_equal_updates
from tests.support.models import small_model
from tests.support.recorder import Recorder
from tests.support.reference import cut, mean_loss, micro_batch, sum_loss, train, window_mean


def mean_of_means() -> None:
    """Row 1: micro-batches of 1 and 7 rows weigh by their rows, across micro-steps and ranks."""
    rank, size = dist.get_rank(), dist.get_world_size()
    rows = lambda r, i: 1 if (r + i) % 2 else 7  # noqa: E731
    model = small_model()
    optimizer = Recorder(model.parameters())
    step = accumulating(steps=2)(lambda model, optimizer, x: LossSum(sum_loss(model, x), x.numel()))
    for i in range(3):
        step(model, optimizer, micro_batch(rank, i, rows(rank, i)))
    step.flush()

    def whole(model, window):
        xs = torch.cat([micro_batch(r, i, rows(r, i)) for r, i in window])
        return sum_loss(model, xs) / xs.numel()

    expected, _ = train(small_model(), cut([3] * size, 2), whole)
    assert_equal_updates(optimizer.seen, expected)
    # The mean of means is something else.
    twin = small_model()
    losses = [sum_loss(twin, x) / x.numel() for x in (micro_batch(r, i, rows(r, i)) for r in range(size) for i in (0, 1))]
    naive = torch.autograd.grad(sum(losses) / len(losses), list(twin.parameters()))
    assert not torch.allclose(naive[0], expected[0][0])


def an_exception_leaves_nothing_behind() -> None:
    """Row 17: where a loop by hand keeps 2/3 of a gradient, the window is discarded."""
    rank = dist.get_rank()
    model = small_model()
    optimizer = Recorder(model.parameters())

    @accumulating(steps=3)
    def step(model, optimizer, x, bad):
        if bad:
            raise ValueError
        return mean_loss(model, x)

    for i in range(2):
        step(model, optimizer, micro_batch(rank, i), bad=False)
    with contextlib.suppress(ValueError):
        step(model, optimizer, micro_batch(rank, 2), bad=True)
    assert all(p.grad is None for p in model.parameters())
    for i in range(3):
        step(model, optimizer, micro_batch(rank, i), bad=False)
    expected, _ = train(small_model(), cut([3] * dist.get_world_size(), 3), window_mean)
    assert_equal_updates(optimizer.seen, expected)


def the_schedulers_pace() -> None:
    """Row 11: once a window, whatever the number of ranks."""
    rank = dist.get_rank()
    model = small_model()
    optimizer = Recorder(model.parameters())
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1 / (1 + n))
    step = accumulating(steps=2)(lambda model, optimizer, scheduler, x: mean_loss(model, x))
    for x in step.over([micro_batch(rank, i) for i in range(5)]):
        step(model, optimizer, scheduler, x)
    assert scheduler.last_epoch == 3
    assert optimizer.param_groups[0]["lr"] == 0.1 / 4


def gradients_of_the_other_half() -> None:
    """Row 18: by hand G's backward pollutes D's gradients; a bystander keeps none."""
    torch.manual_seed(2)
    g, d = torch.nn.Linear(3, 3).double(), torch.nn.Linear(3, 1).double()
    x = micro_batch(dist.get_rank(), 0)
    twin_g, twin_d = copy.deepcopy(g), copy.deepcopy(d)
    twin_d(twin_g(x)).mean().backward()
    assert twin_d.weight.grad is not None
    optimizer = Recorder(g.parameters())
    step = accumulating(steps=1)(lambda g, d, optimizer, x: d(g(x)).mean())
    step(g, d, optimizer, x)
    assert d.weight.grad is None and d.weight.requires_grad


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize(
    "case", [mean_of_means, an_exception_leaves_nothing_behind, the_schedulers_pace, gradients_of_the_other_half]
)
def test_on_any_number_of_ranks(ranks, case, size):
    ranks(size).run(case)


def num_reductions(run) -> list[int]:
    counts = []
    for part in run:
        before = dist.group.WORLD._get_sequence_number_for_group()
        part()
        counts.append(dist.group.WORLD._get_sequence_number_for_group() - before)
    return counts


def no_sync_around_the_backward_alone() -> None:
    """Row 4: it synchronises every micro-batch. Ours cannot be written wrong: there is nothing to write."""
    rank = dist.get_rank()
    model = small_model()
    home = DDP(model)
    optimizer = Recorder(model.parameters())

    def wrong(i):
        loss = mean_loss(home, micro_batch(rank, i)) / 3
        with home.no_sync() if i < 2 else contextlib.nullcontext():
            loss.backward()

    wrong(0)  # the first reduction makes the buckets
    home.zero_grad()
    assert all(n >= 1 for n in num_reductions([lambda i=i: wrong(i) for i in range(3)]))
    home.zero_grad()
    step = accumulating(steps=3)(lambda model, optimizer, x: mean_loss(model, x))
    ours = num_reductions([lambda i=i: step(home, optimizer, micro_batch(rank, i)) for i in range(6)])
    assert ours == [0, 0, 1, 0, 0, 1]


def a_flag_flipped_between_forward_and_backward() -> None:
    """Row 5: two forwards before their backwards leave by-hand ranks with different gradients; ours are right."""
    rank = dist.get_rank()

    def losses(model, x):
        first, second = mean_loss(model, x[:2]), mean_loss(model, x[2:])
        return (second + first) / 2

    model = small_model()
    home = DDP(model)
    optimizer = Recorder(model.parameters())
    step = accumulating(steps=2)(lambda model, optimizer, x: losses(model, x))
    for i in range(4):
        step(home, optimizer, micro_batch(rank, i))
    expected, _ = train(small_model(), cut([4, 4], 2), lambda m, w: sum(losses(m, micro_batch(*p)) for p in w) / len(w))
    assert_equal_updates(optimizer.seen, expected)


def a_validation_loader_in_the_middle_of_a_window() -> None:
    """Row 10: evaluation between two micro-batches changes nothing."""
    rank = dist.get_rank()
    model = small_model()
    home = DDP(model)
    optimizer = Recorder(model.parameters())
    step = accumulating(steps=2)(lambda model, optimizer, x: mean_loss(model, x))
    for x in step.over([micro_batch(rank, i) for i in range(5)]):
        step(home, optimizer, x)
        home.eval()
        with torch.no_grad():
            for i in range(3):
                mean_loss(home, micro_batch(rank, 100 + i))
        home.train()
    expected, _ = train(small_model(), cut([5, 5], 2), window_mean)
    assert_equal_updates(optimizer.seen, expected)


@pytest.mark.parametrize(
    "case",
    [
        no_sync_around_the_backward_alone, a_flag_flipped_between_forward_and_backward,
        a_validation_loader_in_the_middle_of_a_window,
    ],
)  # fmt: skip
def test_on_two_ranks(ranks, case):
    ranks(2).run(case)
