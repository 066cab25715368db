"""What ranks have to agree on, and what each of them is told where they do not."""

from __future__ import annotations

import re
import time
from contextlib import suppress

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP

import gradsync
from gradsync import LossSum, accumulating
from tests.support.compare import assert_equal_updates
from tests.support.homes import mesh
from tests.support.models import small_model
from tests.support.recorder import Recorder
from tests.support.reference import mean_loss, micro_batch, sum_loss, train, window_mean
from tests.support.traps import Trap


def bare(model):
    return model


def sharded(model):
    return fully_shard(model, mesh=mesh((2,), ("data",)))


def sums(model, x):
    return LossSum(sum_loss(model, x), x.numel())


class SumsLater:
    """Two means, and then sums."""

    calls = 0

    def __call__(self, model, x):
        self.calls += 1
        return mean_loss(model, x) if self.calls <= 2 else sums(model, x)


def two(window: int) -> int:
    return 2


def three_later(window: int) -> int:
    return 3 if window == 1 else 2


def with_buffer(size: int) -> nn.Module:
    model = small_model()
    model.register_buffer("seen", torch.zeros(size))
    return model


def scaler(scale: float) -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=scale)


def disagreement(options: tuple[dict, dict], over: bool = False, wrap=bare) -> str:
    """What each rank is told of a function that it decorates with options of its own, a model or a loss among them."""
    rank = dist.get_rank()
    mine = {"module": small_model(), "loss": mean_loss, "steps": 2} | options[rank]
    model, loss = wrap(mine.pop("module")), mine.pop("loss")
    optimizer = Recorder(model.parameters())
    step = accumulating(**mine)(lambda model, optimizer, x: loss(model, x))
    items = [micro_batch(rank, i) for i in range(6)]
    try:
        for x in step.over(items) if over else items:
            step(model, optimizer, x)
    except gradsync.GradSyncError as error:
        return str(error)
    return "no error"


MEANS_AND_SUMS = ["same kind of loss", "rank 0 has a mean", "rank 1 has a LossSum"]
OTHER_STEPS = ["same number of steps in a window", "rank 0 has 2", "rank 1 has 3"]
CASES = {
    "steps": ({"steps": 2}, {"steps": 3}, ["same steps", "rank 0 has 2", "rank 1 has 3"]),
    "steps later": ({"steps": two}, {"steps": three_later}, OTHER_STEPS),
    "tail": ({"tail": "step"}, {"tail": "drop"}, ["same tail", "rank 0 has step", "rank 1 has drop"]),
    "loss": ({"loss": mean_loss}, {"loss": sums}, MEANS_AND_SUMS),
    "loss later": ({"skip": KeyError}, {"skip": KeyError, "loss": SumsLater()}, MEANS_AND_SUMS),
    "parameters": (
        {"module": nn.Linear(3, 2).double()}, {"module": nn.Linear(3, 3).double()},
        ["same trainable parameters", "rank 0 has 2 of 8", "rank 1 has 2 of 12"],
    ),
    "buffers": (
        {"module": with_buffer(3)}, {"module": with_buffer(4)},
        ["same buffers", "rank 0 has 1 of 3", "rank 1 has 1 of 4"],
    ),
    "a function": (
        {"steps": 2}, {"steps": two}, ["same kind of steps", "rank 0 has a number", "rank 1 has a function"],
    ),
    "sync": ({"sync": "window"}, {"sync": "each"}, ["same sync", "rank 0 has window", "rank 1 has each"]),
    "scaler": ({}, {"scaler": scaler(2.0)}, ["GradScaler", "rank 0 has ", "rank 1 has "]),
    "scale": (
        {"scaler": scaler(1.0)}, {"scaler": scaler(2.0)}, ["GradScaler, but rank 0 has ", "1.0, rank 1 has ", "2.0"],
    ),
}  # fmt: skip


@pytest.mark.parametrize(("first", "second", "words"), CASES.values(), ids=CASES)
def test_disagreement_is_told_on_every_rank(ranks, first, second, words):
    for over in (False, True):
        for text in ranks(2).run(disagreement, (first, second), over, limit=10):
            assert all(word in text for word in words), text


def disagreement_in_sync_every() -> str:
    rank, model = dist.get_rank(), small_model()
    try:
        for micro, x in gradsync.sync_every(model, [two, three_later][rank], [micro_batch(rank, i) for i in range(8)]):
            micro.backward(mean_loss(model, x))
    except gradsync.GradSyncError as error:
        return str(error)
    return "no error"


def test_other_steps_of_sync_every_are_told_on_every_rank(ranks):
    for text in ranks(2).run(disagreement_in_sync_every):
        assert all(word in text for word in OTHER_STEPS), text


@pytest.mark.parametrize("steps", [(2, 3), (two, three_later)], ids=["from the first", "later"])
def test_where_forwards_communicate_other_steps_are_told_before_ranks_wait_for_each_other(ranks, steps):
    """The rank with fewer would wait at its boundary for one that waits in a forward."""
    options = tuple({"steps": one} for one in steps)
    for text in ranks(2).run(disagreement, options, False, sharded, limit=10):
        assert all(word in text for word in OTHER_STEPS), text


def empty_rank_unknown(everywhere: bool, flush: bool) -> str:
    """A rank without items whose models nobody named."""
    rank = dist.get_rank()
    model = small_model()
    optimizer = Recorder(model.parameters())
    step = accumulating(steps=2)(lambda model, optimizer, x: mean_loss(model, x))
    try:
        items = [] if everywhere or rank == 1 else [micro_batch(rank, 0)]
        for x in items if flush else step.over(items):
            step(model, optimizer, x)
        if flush:
            step.flush()
    except gradsync.GradSyncError as error:
        return str(error)
    return "no error"


def test_a_rank_without_items_and_without_models_is_named_everywhere(ranks):
    for flush in (False, True):
        for text in ranks(2).run(empty_rank_unknown, False, flush):
            assert "rank 1 had none" in text and "model=..." in text, text
        assert ranks(2).run(empty_rank_unknown, True, flush) == ["no error"] * 2


def empty_sub_group(named: bool, lengths: list[int], flush: bool) -> str:
    """The model is that of ranks 0 and 1; rank 2 has a life of its own."""
    group, rank = dist.new_group([0, 1]), dist.get_rank()
    if rank == 2:
        return "no error"
    model = small_model()
    home = DDP(model, process_group=group)
    optimizer = Recorder(model.parameters())
    step = accumulating(steps=2, **({"model": home, "optimizer": optimizer} if named else {}))(
        lambda model, optimizer, x: mean_loss(model, x)
    )
    try:
        for x in step.over([micro_batch(rank, i) for i in range(lengths[rank])]):
            step(home, optimizer, x)
        if flush:
            step.flush()
    except gradsync.GradSyncError as error:
        return str(error)
    return "no error"


def test_a_sub_group_waits_for_nobody_outside(ranks):
    """Where the models are named, only their ranks meet; where nobody knows them, which ranks these are is not known."""
    for flush in (False, True):
        assert ranks(3).run(empty_sub_group, True, [0, 0], flush, limit=20) == ["no error"] * 3
    assert ranks(3).run(empty_sub_group, True, [3, 0], False, limit=20) == ["no error"] * 3
    for text in ranks(3).run(empty_sub_group, False, [0, 0], False, limit=20)[:2]:
        assert "had none" in text and "model=..." in text, text
    said = ranks(3).run(empty_sub_group, False, [2, 0], False, limit=20)
    assert all("rank 1 had none" in text for text in said[:2]), said
    ranks(3).stop()  # its groups stay, and with them no rank without items can know whom to wait for


def an_empty_rank_goes_on(of_all: bool) -> list[str]:
    """Rank 1 has no item at first. The model is on another group than the default group."""
    group, rank = dist.new_group([0, 1]), dist.get_rank()
    if not of_all and rank == 2:
        return []
    model = small_model()
    home = DDP(model, process_group=group)
    optimizer = Recorder(model.parameters())
    step = accumulating(steps=2)(lambda home, optimizer, x: mean_loss(home, x))
    said = []
    for lengths in ([1, 0], [2, 0], [2, 3]):
        try:
            for x in step.over([micro_batch(rank, i) for i in range(lengths[rank])]):
                step(home, optimizer, x)
        except gradsync.GradSyncError as error:
            said.append(str(error))
            if not of_all:
                time.sleep(3)  # this rank raises at once, the other one when it looks
    expected, _ = train(small_model(), [[(0, 0), (0, 1), (1, 0), (1, 1)], [(1, 2)]], window_mean)
    assert_equal_updates(optimizer.seen, expected)
    return said


@pytest.mark.parametrize("of_all", [True, False])
def test_ranks_go_on_after_that_error(ranks, of_all):
    """On any group: what was no meeting is counted by no rank."""
    many = ranks(2 if of_all else 3)
    for said in many.run(an_empty_rank_goes_on, of_all, limit=30)[:2]:
        assert len(said) == 2 and all("rank 1 had none when" in text for text in said), said
    if not of_all:
        many.stop()


def flushing_an_empty_rank(wrap) -> None:
    """A rank that never called the function takes part in its flush, where models and optimizer are named."""
    rank = dist.get_rank()
    model = small_model()
    home = wrap(model)
    optimizer = Recorder(model.parameters())
    step = accumulating(steps=4, model=home, optimizer=optimizer)(lambda x: mean_loss(home, x))
    for i in range(0 if rank else 3):
        step(micro_batch(rank, i))
    step.flush()
    expected, _ = train(small_model(), [[(0, 0), (0, 1), (0, 2)]], window_mean)
    assert_equal_updates(optimizer.seen, expected)


@pytest.mark.parametrize("wrap", [bare, DDP])
def test_a_rank_that_flushes_before_any_call(ranks, wrap):
    ranks(2).run(flushing_an_empty_rank, wrap)


def joined() -> str:
    home = DDP(small_model())
    optimizer = torch.optim.SGD(home.parameters(), lr=0.1)
    step = accumulating(steps=2)(lambda home, optimizer, x: mean_loss(home, x))
    try:
        with Join([home]):
            for x in step.over([micro_batch(dist.get_rank(), i) for i in range(5 - 3 * dist.get_rank())]):
                step(home, optimizer, x)
    except gradsync.GradSyncError as error:
        return str(error)
    return "no error"


def test_torchs_join_around_a_loop_is_an_error_on_every_rank(ranks):
    for text in ranks(2).run(joined, limit=15):
        assert "torch's Join is around it" in text, text


def last_call_failed(more: int, sized: bool) -> str:
    """The backward of a rank's last call fails, which the body catches, and other ranks go on."""
    rank = dist.get_rank()
    model = small_model()
    optimizer = Recorder(model.parameters())

    @accumulating(steps=2, model=model, optimizer=optimizer)
    def step(x, error):
        return model(Trap.apply(x.requires_grad_(), error)).square().mean()

    items = range(2 + (more if rank == 0 else 0))
    try:
        for i in step.over(items if sized else iter(items)):
            with suppress(ZeroDivisionError):
                step(micro_batch(rank, i), ZeroDivisionError() if (rank, i) == (1, 1) else None)
    except gradsync.GradSyncError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize("sized", [True, False])
@pytest.mark.parametrize("more", [1, 2, 4])
def test_a_rank_that_has_run_out_after_a_boundary_that_failed_is_told_of(ranks, more, sized):
    for text in ranks(2).run(last_call_failed, more, sized, limit=15):
        assert "rank 0 has 1, rank 1 has 0. A boundary failed on the rank that has fewer" in text, text


def other_items_with_sync_batchnorm(known: bool) -> str:
    rank = dist.get_rank()
    model = fully_shard(nn.Sequential(nn.SyncBatchNorm(3), nn.Linear(3, 1)), mesh=mesh((2,), ("data",)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = accumulating(steps=2)(lambda model, optimizer, x: model(x).sum())
    items = [micro_batch(rank, i) for i in range(4 + rank if known else 4)]
    with pytest.raises(gradsync.GradSyncError) as caught:
        for x in step.over(items if known else iter(items)):
            step(model, optimizer, x)
    return str(caught.value)


def test_sync_batchnorm_needs_equally_many_items(ranks):
    """Each of its forwards waits for all ranks: it is said before the first."""
    for known, words in ((True, "rank 0 has 4, rank 1 has 5"), (False, "rank 0 has ?, rank 1 has ?")):
        for text in ranks(2).run(other_items_with_sync_batchnorm, known):
            assert "SyncBatchNorm waits for every rank" in text and words in text, text


def test_on_one_rank_sync_batchnorm_waits_for_nobody():
    model = nn.Sequential(nn.SyncBatchNorm(3), nn.Linear(3, 1)).double()
    optimizer = Recorder(model.parameters())
    step = accumulating(steps=2)(lambda model, optimizer, x: model(x).sum())
    for x in step.over(iter([micro_batch(0, i) for i in range(3)])):
        step(model, optimizer, x)
    assert len(optimizer.seen) == 2


def in_another_order(rank, i):
    return [rank, 1 - rank]


def before_the_other(rank, i):
    return [1, 0][1 - i :]


def after_the_other(rank, i):
    return [0, 1][: 1 + i]


def two_functions(turns, lengths: list[int], named: bool, wrap) -> str:
    """Two functions in one loop; `turns` says in which order a rank calls which of them with an item."""
    rank = dist.get_rank()
    steps, homes = [], []
    for _ in range(2):
        home = wrap(small_model())
        optimizer = torch.optim.SGD(home.parameters(), lr=0.1)
        known = {"model": home, "optimizer": optimizer} if named else {}
        steps.append(accumulating(steps=1, **known)(lambda x, model, optimizer: mean_loss(model, x)))
        homes.append((home, optimizer))
    try:
        for i in steps[0].over(steps[1].over(range(lengths[rank]))):
            for turn in turns(rank, i):
                steps[turn](micro_batch(rank, i), *homes[turn])
    except gradsync.GradSyncError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize("wrap", [bare, sharded])
def test_functions_called_in_another_order(ranks, wrap):
    for text in ranks(2).run(two_functions, in_another_order, [2, 2], True, wrap, limit=15):
        assert "same windows of" in text and "Call the functions in one order on all ranks" in text, text


@pytest.mark.parametrize("wrap", [bare, sharded])
def test_a_function_that_is_first_called_when_a_rank_has_run_out(ranks, wrap):
    """That rank cannot know the models, whose engine all ranks must make. It may have left the loop already."""
    words = "Every rank needs an item that calls each function with each of its models .* but rank 1 had run out before"
    for text in ranks(2).run(two_functions, before_the_other, [2, 1], False, wrap, limit=15):
        assert re.search(words, text), text
    told, text = ranks(2).run(two_functions, after_the_other, [2, 1], False, wrap, limit=15)
    assert re.search(words, told) and text == "no error", (told, text)
