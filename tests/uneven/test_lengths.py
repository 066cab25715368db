"""Ranks with different numbers of micro-batches, on DDP: nobody hangs, and each counts once."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import gradsync
from gradsync import LossSum, accumulating
from tests.support.compare import assert_equal_updates
from tests.support.items import unsized
from tests.support.models import small_model
from tests.support.recorder import Recorder
from tests.support.reference import cut, mean_loss, micro_batch, sum_loss, train, window_mean
from tests.support.loops import over, over_unsized, sync_every


def bare(model: nn.Module) -> nn.Module:
    return model


WRAPS = {
    "bare": bare, "ddp": DDP, "find_unused": partial(DDP, find_unused_parameters=True),
    "views": partial(DDP, gradient_as_bucket_view=True), "buckets": partial(DDP, bucket_cap_mb=1e-4),
    "static": partial(DDP, static_graph=True),
}  # fmt: skip
MAY_STAY_UNUSED = {"bare", "find_unused"}


def sums(model, x) -> LossSum:
    return LossSum(sum_loss(model, x), x.numel())


def uneven(lengths: list[int], steps, loop, wrap: str, loss=mean_loss) -> None:
    """Ranks with different numbers of micro-batches, and counts that differ."""
    rank, unused = dist.get_rank(), wrap in MAY_STAY_UNUSED
    model = small_model(unused=unused)
    home = WRAPS[wrap](model)
    optimizer = Recorder(model.parameters())
    rows = lambda r, i: 1 + (5 * r + 3 * i) % 4  # noqa: E731
    data = [micro_batch(rank, i, rows(rank, i)) for i in range(lengths[rank])]
    loop(steps, home, optimizer, lambda x: loss(home, x), data)

    def whole(model, window):
        xs = [micro_batch(r, i, rows(r, i)) for r, i in window]
        if loss is sums:
            return sum(sum_loss(model, x) for x in xs) / sum(x.numel() for x in xs)
        return sum(mean_loss(model, x) for x in xs) / len(xs)

    expected, _ = train(small_model(unused=unused), cut(lengths, steps), whole)
    assert_equal_updates(optimizer.seen, expected)


def changed_after_one_has_run_out(lengths: list[int], wrap, sized: bool) -> None:
    """A layer is unfrozen in `on_update`, on all ranks after the same update, when one of them has no items left."""
    rank = dist.get_rank()

    def made() -> nn.Sequential:
        model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), small_model())
        model.double()[0].requires_grad_(False)
        return model

    torch.manual_seed(1)
    model = made()
    torch.manual_seed(1)
    twin = made()
    home = wrap(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def unfreeze(progress) -> None:
        if progress.updates == 2:
            model[0].requires_grad_(True)

    @gradsync.accumulating(steps=2, on_update=unfreeze)
    def step(home, optimizer, x):
        return mean_loss(home, x)

    data = [micro_batch(rank, i) for i in range(lengths[rank])]
    for x in step.over(data if sized else unsized(data)):
        step(home, optimizer, x)
    by_hand = torch.optim.SGD(twin.parameters(), lr=0.1)
    for number, window in enumerate(cut(lengths, 2)):
        window_mean(twin, window).backward()
        by_hand.step()
        by_hand.zero_grad()
        if number == 1:
            twin[0].requires_grad_(True)
    assert step.progress.updates == number + 1
    for p, expected in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.allclose(p, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("sized", [True, False])
@pytest.mark.parametrize("wrap", [bare, DDP])
@pytest.mark.parametrize("lengths", [[7, 2], [4, 4], [4, 6], [3, 9]])
def test_participants_change_after_a_rank_has_run_out(ranks, lengths, wrap, sized):
    ranks(2).run(changed_after_one_has_run_out, lengths, wrap, sized, limit=15)


class Replacing:
    """A trainer whose `on_update` puts another object where a keyword finds it, on all ranks after the same update."""

    def __init__(self, replacing, after: int) -> None:
        self.model = small_model()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.schedule = torch.optim.lr_scheduler.ConstantLR(self.optimizer, 0.5, total_iters=2)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
        self.replacing, self.after = replacing, after
        self.step = accumulating(
            2, model=lambda *_: self.model, optimizer=lambda *_: self.optimizer, scheduler=lambda *_: self.schedule,
            scaler=lambda *_: self.scaler, on_update=self.replace,
        )(self.loss)  # fmt: skip

    def loss(self, x, loss):
        return loss(self.model(x), x[:, :2])

    def replace(self, progress) -> None:
        if progress.updates == self.after:
            self.replacing(self)


def the_schedule(trainer: Replacing) -> None:
    trainer.schedule = torch.optim.lr_scheduler.ExponentialLR(trainer.optimizer, 0.1)


def the_scaler(trainer: Replacing) -> None:
    trainer.scaler = torch.amp.GradScaler("cpu", init_scale=8.0)


def nothing(trainer: Replacing) -> None:
    pass


def replaced_after_one_has_run_out(replacing, after: int) -> str:
    trainer = Replacing(replacing, after)
    rank = dist.get_rank()
    try:
        for x in trainer.step.over([micro_batch(rank, i) for i in range([9, 4][rank])]):
            trainer.step(x, nn.MSELoss())
    except gradsync.GradSyncError as error:
        return str(error)
    weight = trainer.model[0].weight.detach()
    theirs = [torch.empty_like(weight) for _ in range(2)]
    dist.all_gather(theirs, weight)
    assert torch.equal(*theirs)
    return "no error"


@pytest.mark.parametrize("replacing", [the_schedule, the_scaler, nothing])
@pytest.mark.parametrize("after", [1, 3])
def test_a_participant_that_is_replaced_after_a_rank_has_run_out(ranks, replacing, after):
    """That rank has no call that could bring it. While all ranks have calls, all of them take the new one."""
    for text in ranks(2).run(replaced_after_one_has_run_out, replacing, after, limit=15):
        if replacing is nothing or after == 1:
            assert text == "no error"
        else:
            assert "number of times that a participant was replaced" in text or "scale of the GradScaler" in text, text


UNEVEN = [[5, 3], [3, 5], [1, 9], [9, 1], [4, 8], [8, 7], [1, 1]]


@pytest.mark.parametrize("loop", [over, over_unsized, sync_every])
@pytest.mark.parametrize("wrap", WRAPS)
@pytest.mark.parametrize("loss", [mean_loss, sums])
def test_ranks_with_different_numbers_of_micro_batches(ranks, loop, wrap, loss):
    """Nobody hangs, and each micro-batch and each count weighs once."""
    for lengths in UNEVEN:
        ranks(2).run(uneven, lengths, 4, loop, wrap, loss)
    ranks(3).run(uneven, [3, 7, 5], 3, loop, wrap, loss)


@pytest.mark.parametrize("wrap", ["bare", "ddp", "find_unused", "views"])
def test_a_rank_without_any_micro_batch_takes_part(ranks, wrap):
    """Models and optimizers are known by keyword."""
    for lengths in ([0, 5], [6, 0]):
        ranks(2).run(uneven, lengths, 4, over, wrap)
    ranks(3).run(uneven, [0, 7, 0], 3, over_unsized, wrap, sums)


def sub_group() -> None:
    """The model's own group: rank 2 has nothing to do with it."""
    rank = dist.get_rank()
    group = dist.new_group([0, 1])
    if rank == 2:
        return
    model = small_model()
    home = DDP(model, process_group=group)
    optimizer = Recorder(model.parameters())
    step = accumulating(steps=2)(lambda model, optimizer, x: mean_loss(model, x))
    for x in step.over([micro_batch(rank, i) for i in range(3 + 2 * rank)]):
        step(home, optimizer, x)
    expected, _ = train(small_model(), cut([3, 5], 2), window_mean)
    assert_equal_updates(optimizer.seen, expected)


def test_a_sub_group(ranks):
    ranks(3).run(sub_group)
    ranks(3).stop()  # with its group, no rank without items can know whom to wait for


def open_on_one_rank(calls: list[int]) -> None:
    """Windows that are open on some ranks as a loop without items begins."""
    rank = dist.get_rank()
    model = small_model()
    optimizer = Recorder(model.parameters())
    step = accumulating(steps=3, model=model, optimizer=optimizer)(lambda x: mean_loss(model, x))
    for i in range(calls[rank]):
        step(micro_batch(rank, i))
    for _ in step.over([]):
        pass
    expected, _ = train(small_model(), [[(r, i) for r in range(2) for i in range(calls[r])]], window_mean)
    assert_equal_updates(optimizer.seen, expected)


@pytest.mark.parametrize("calls", [[1, 1], [0, 1], [2, 0]])
def test_a_window_that_is_open_as_a_loop_without_items_begins(ranks, calls):
    """The data has ended, and it closes, also on a rank that has none."""
    ranks(2).run(open_on_one_rank, calls, limit=15)
