"""What runs on the ranks for test_peers.py: other tools' loops beside ours."""

from __future__ import annotations

import contextlib
import copy

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

from gradsync import LossSum, accumulating
from tests.support.reference import (
    Recorder, assert_equal_updates, cut, mean_loss, micro_batch, small_model, sum_loss, train, window_mean,
)  # fmt: skip


def with_accelerate(length: int, steps: int) -> tuple[list, list]:
    """The updates of Accelerate's accumulate, on a prepared loader, and of gradsync."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState, PartialState

    rank, size = dist.get_rank(), dist.get_world_size()
    data = [micro_batch(rank, i) for i in range(length)]
    theirs = small_model()
    optimizer = Recorder(theirs.parameters())
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state() if state is not GradientState else state._shared_state.clear()
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=steps)
    wrapped = DDP(theirs) if size > 1 else theirs
    wrapped, prepared = accelerator.prepare(wrapped, optimizer)
    loader = accelerator.prepare_data_loader(torch.utils.data.DataLoader(torch.stack(data), batch_size=None))
    if size > 1:  # each rank has data of its own already
        loader = _Whole(data, accelerator.gradient_state)
    for x in loader:
        with accelerator.accumulate(wrapped):
            accelerator.backward(mean_loss(wrapped, x))
            prepared.step()
            prepared.zero_grad()
    return optimizer.seen, data


class _Whole:
    """A loader that tells Accelerate of its end, as a prepared one does."""

    def __init__(self, data, state):
        self.data, self.state, self.remainder, self.end_of_dataloader = data, state, -1, False

    def __iter__(self):
        self.state._add_dataloader(self)
        for i, x in enumerate(self.data):
            self.end_of_dataloader = i == len(self.data) - 1
            yield x
        self.state._remove_dataloader(self)


def full_windows() -> None:
    """Where the window is full, Accelerate and gradsync agree, within a rounding of float64."""
    theirs, data = with_accelerate(6, 3)
    model = small_model()
    home = DDP(model) if dist.get_world_size() > 1 else model
    optimizer = Recorder(model.parameters())
    step = accumulating(steps=3)(lambda model, optimizer, x: mean_loss(model, x))
    for x in step.over(data):
        step(home, optimizer, x)
    assert len(theirs) == len(optimizer.seen) == 2
    assert_equal_updates(optimizer.seen, theirs, 1e-15)


def the_tail() -> None:
    """Rows 2 and 3: the short window at the end. Theirs is too small by its length over N; ours is the mean."""
    theirs, data = with_accelerate(4, 3)
    size = dist.get_world_size()
    model = small_model()
    home = DDP(model) if size > 1 else model
    optimizer = Recorder(model.parameters())
    step = accumulating(steps=3)(lambda model, optimizer, x: mean_loss(model, x))
    for x in step.over(data):
        step(home, optimizer, x)
    expected, _ = train(small_model(), cut([4] * size, 3), window_mean)
    assert_equal_updates(optimizer.seen, expected)
    assert len(theirs) == 2
    for theirs_g, exact in zip(theirs[1], expected[1]):
        torch.testing.assert_close(theirs_g, exact / 3)


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
