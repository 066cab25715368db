"""Parameters that some micro-batches, ranks or windows do not use."""

from __future__ import annotations

import contextlib
import copy
import itertools
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable.replicate import replicate
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP

import gradsync
from gradsync import accumulating
from tests.support.compare import assert_equal_updates
from tests.support.models import small_model
from tests.support.recorder import Recorder
from tests.support.reference import cut, mean_loss, micro_batch, train, window_mean
from tests.support.traps import Trap
from tests.support.verdicts import refused, verdict, verdicts


def searched() -> tuple[DDP, Recorder]:
    """A model with an unused parameter on a DDP that looks for those."""
    model = small_model(unused=True)
    return DDP(model, find_unused_parameters=True), Recorder(model.parameters())


def dropped_by_the_user() -> None:
    """A search for unused parameters remembers what held backwards used, also if somebody drops their gradients."""
    ranks, rank = range(dist.get_world_size()), dist.get_rank()
    home, optimizer = searched()

    @accumulating(steps=1)
    def step(model, optimizer, x, fails=False):
        loss = mean_loss(model, x)
        if fails:
            loss.register_hook(lambda _: 1 / 0)
        return loss

    step(home, optimizer, micro_batch(rank, 0))
    for micro, x in zip(gradsync.sync_every(home, 2), [micro_batch(rank, 1)], strict=False):
        micro.backward(mean_loss(home, x))
    optimizer.zero_grad()
    for fails in (True, False):
        with contextlib.suppress(ZeroDivisionError):
            step(home, optimizer, micro_batch(rank, 2), fails=fails)
    with gradsync.no_sync(home):
        mean_loss(home, micro_batch(rank, 3)).backward()
    optimizer.zero_grad()
    step(home, optimizer, micro_batch(rank, 4))
    expected, _ = train(small_model(unused=True), [[(r, i) for r in ranks] for i in (0, 2, 4)], window_mean)
    assert_equal_updates(optimizer.seen, expected)


def dropped_by_a_backward() -> None:
    """The same for a held backward that fails half-way with a type in `skip`, and a tail that then closes."""
    ranks, rank = range(dist.get_world_size()), dist.get_rank()
    home, optimizer = searched()

    @accumulating(steps=2, skip=ZeroDivisionError)
    def step(home, optimizer, number):
        x = micro_batch(rank, number).requires_grad_()
        if number == 0:
            x.register_hook(lambda _: 1 / 0)  # after the last parameter
        return mean_loss(home, x)

    for numbers in ([0], [1, 2]):
        for number in step.over(numbers):
            step(home, optimizer, number)
    expected, _ = train(small_model(unused=True), [[(r, i) for r in ranks for i in (1, 2)]], window_mean)
    assert_equal_updates(optimizer.seen, expected)
    assert step.progress.dropped == step.progress.skipped == 1


@pytest.mark.parametrize("size", [1, 2])
def test_gradients_that_the_user_drops(ranks, size):
    ranks(size).run(dropped_by_the_user)
    ranks(size).run(dropped_by_a_backward)


def backwards_of_the_users_own() -> None:
    """The search takes note of backwards outside of all windows, too; what only these used stays None."""
    ranks, rank = range(dist.get_world_size()), dist.get_rank()
    home, optimizer = searched()
    step = accumulating(steps=1)(mean_step)
    lengths = [3 - r for r in ranks]
    for i in step.over(range(lengths[rank])):
        for parameter in home.parameters():
            parameter.sum().backward()  # the reducer is not armed: its hooks take note, and no more
        optimizer.zero_grad()
        step(home, optimizer, micro_batch(rank, i))
    windows = [[(r, i) for r in ranks if i < lengths[r]] for i in range(max(lengths))]
    expected, _ = train(small_model(unused=True), windows, window_mean)
    assert any(gradient is None for gradient in expected[0])
    assert_equal_updates(optimizer.seen, expected)


def mean_step(home, optimizer, x):
    return mean_loss(home, x)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_backwards_of_the_users_own_between_windows(ranks, size):
    ranks(size).run(backwards_of_the_users_own)


def unused_in_ddp() -> str:
    """What DDP itself would only report at the next forward."""
    model = small_model(unused=True)
    optimizer = Recorder(model.parameters())
    step = accumulating(steps=1)(lambda model, optimizer, x: mean_loss(model, x))
    try:
        step(DDP(model), optimizer, micro_batch(dist.get_rank(), 0))
    except gradsync.GradSyncError as error:
        return str(error)
    return "no error"


def test_a_parameter_that_ddp_finds_unused_is_an_error_on_every_rank(ranks):
    for text in ranks(2).run(unused_in_ddp):
        assert "no micro-batch of the window used unused" in text and "find_unused_parameters=True" in text


def unused_sometimes() -> None:
    """A bare model's parameter that this rank, or this micro-batch, did not use; one that nobody used stays None."""
    rank = dist.get_rank()
    model = nn.ModuleList([nn.Linear(3, 1).double() for _ in range(4)])
    optimizer = Recorder(model.parameters(), lr=0.0)
    uses = {0: {0: [0], 1: [0, 1]}, 1: {0: [0], 1: [2]}}  # rank, micro-batch -> layers; the last is never used

    @accumulating(steps=2)
    def step(model, optimizer, x, layers):
        return sum(mean_loss(model[i], x) for i in layers)

    for _ in range(3):
        for i in range(2):
            step(model, optimizer, micro_batch(rank, i), uses[rank][i])
    twin = copy.deepcopy(model)
    loss = sum(mean_loss(twin[k], micro_batch(r, i)) for r in (0, 1) for i in (0, 1) for k in uses[r][i]) / 4
    expected = torch.autograd.grad(loss, list(twin.parameters()), allow_unused=True)
    assert expected[-1] is None
    assert_equal_updates(optimizer.seen, [list(expected)] * 3)


def test_a_bare_models_parameter_that_not_every_rank_uses(ranks):
    ranks(2).run(unused_sometimes)


def bare(model):
    return model


def freezing(wrap) -> None:
    """Layers frozen and unfrozen between windows synchronise as they are."""
    rank = dist.get_rank()
    model, twin = small_model(), small_model()
    for one in (model, twin):
        one[0].requires_grad_(False)
    home = wrap(model)
    optimizer = Recorder(model.parameters(), lr=0.0)
    step = accumulating(steps=2)(lambda model, optimizer, x: mean_loss(model, x))
    for window, trainable in enumerate([False, True, True, False, True]):
        model[0].requires_grad_(trainable)
        for i in range(2):
            step(home, optimizer, micro_batch(rank, 2 * window + i))
    expected, _ = train(small_model(), cut([10, 10], 2), window_mean, lr=0.0)
    for window, trainable in enumerate([False, True, True, False, True]):
        want = expected[window] if trainable else [None, None, *expected[window][2:]]
        assert_equal_updates([optimizer.seen[window]], [want])


@pytest.mark.parametrize("wrap", [bare, DDP])
def test_parameters_frozen_and_unfrozen_during_training(ranks, wrap):
    ranks(2).run(freezing, wrap)


def every_use(cap: float) -> None:
    """Each window of two micro-batches that use one layer or two, on two ranks; with buckets of that size."""
    rank = dist.get_rank()
    layers = nn.ModuleList([nn.Linear(3, 1).double() for _ in range(2)])
    twin = copy.deepcopy(layers)
    alone = {(r, i, k): torch.autograd.grad(mean_loss(twin[k], micro_batch(r, i)), twin[k].weight)[0]
             for r in (0, 1) for i in (0, 1) for k in (0, 1)}  # fmt: skip

    class Some(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = layers

        def forward(self, x, uses):
            return sum(mean_loss(self.layers[k], x) for k in uses)

    home = DDP(Some(), find_unused_parameters=True, bucket_cap_mb=cap)
    for uses in itertools.product([[0], [1], [0, 1]], repeat=4):  # of rank 0's micro-batches, and of rank 1's
        for micro, i in gradsync.sync_every(home, 2, range(2)):
            micro.backward(home(micro_batch(rank, i), uses[2 * rank + i]))
        for k, layer in enumerate(layers):
            used = [alone[r, i, k] for r in (0, 1) for i in (0, 1) if k in uses[2 * r + i]]
            if used:
                torch.testing.assert_close(layer.weight.grad, sum(used) / 4, rtol=1e-12, atol=1e-14)
            else:
                assert layer.weight.grad is None and layer.bias.grad is None, uses
        home.zero_grad()


@pytest.mark.parametrize("cap", [25, 1e-5])
def test_whatever_micro_batches_use_the_gradients_are_exact_and_what_none_used_stays_none(ranks, cap):
    ranks(2).run(every_use, cap)


class Heads(nn.Module):
    """A body and three heads, of which each call names those that it uses."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.body = nn.Linear(3, 4).double()
        self.heads = nn.ModuleList([nn.Linear(4, 2).double() for _ in range(3)])

    def forward(self, x, uses):
        h = torch.tanh(self.body(x))
        return sum(self.heads[k](h) for k in uses)


def heads_step(home, optimizer, x, uses):
    if not uses:
        raise ZeroDivisionError
    return home(x, uses).square().mean()


def gradients(windows) -> list[list[torch.Tensor | None]]:
    """What each window gives, a list of (rank, micro-batch, heads): the mean over these, by plain autograd."""
    twin = Heads()
    losses = [sum(twin(micro_batch(r, i), uses).square().mean() for r, i, uses in w) / len(w) for w in windows]
    return [list(torch.autograd.grad(loss, list(twin.parameters()), allow_unused=True)) for loss in losses]


def wrapped(wrap: str) -> tuple[nn.Module, Recorder]:
    """A model with heads on DDP, and an optimizer that leaves it where it is."""
    model = Heads()
    optimizer = Recorder(model.parameters(), lr=0.0)
    return WRAPS[wrap](model), optimizer


def departures(home: DDP, model: Heads, loop) -> list[object]:
    """In which order the buckets leave, and the body's gradient comes, in a window that ends with another head."""
    events: list[object] = []

    def leaves(_, bucket):
        events.append([id(p) for p in bucket.parameters()])
        future = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    home.register_comm_hook(None, leaves)
    watch = model.body.weight.register_hook(lambda _: events.append("the body's gradient"))
    loop(home)
    watch.remove()
    names = {id(p): name for name, p in model.named_parameters()}
    return [one if isinstance(one, str) else [names[key] for key in one] for one in events]


def torchs_own(home: DDP) -> None:
    with home.no_sync():
        home(micro_batch(0, 0), [0]).square().mean().backward()
    home(micro_batch(0, 1), [1]).square().mean().backward()


def gradsyncs(home: DDP) -> None:
    for micro, i in gradsync.sync_every(home, 2, range(2)):
        micro.backward(home(micro_batch(0, i), [i]).square().mean())


def no_bucket_waits() -> None:
    by = []
    for loop in (torchs_own, gradsyncs):
        model = Heads()
        by.append(departures(DDP(model, find_unused_parameters=True, bucket_cap_mb=1e-5), model, loop))
    assert by[0] == by[1]
    assert len(by[0]) > 4 and by[0].index("the body's gradient", 1) > 2, by[0]


def test_no_bucket_waits_for_the_end_of_a_backward_that_does_not_reach_it(ranks):
    """What only held micro-batches used travels when it would travel by hand, while the backward still runs."""
    ranks(1).run(no_bucket_waits)


def looks_first(whole: bool) -> None:
    """What is given as `run` may ask for gradients of its own before its backward: that is no backward."""
    rank = dist.get_rank()
    home, optimizer = wrapped("find_unused")
    uses = [[[0], [1]], [[0, 1], [1]]]

    def run(loss):
        asked = home.module.parameters() if whole else [home.module.body.weight]
        torch.autograd.grad(loss, list(asked), retain_graph=True, allow_unused=True)
        loss.backward()

    for _ in range(2):
        for micro, i in gradsync.sync_every(home, 2, range(2)):
            micro.backward(home(micro_batch(rank, i), uses[rank][i]).square().mean(), run=run)
        optimizer.step()
        optimizer.zero_grad()
    [expected] = gradients([[(r, i, uses[r][i]) for r in (0, 1) for i in (0, 1)]])
    assert_equal_updates(optimizer.seen, [expected] * 2)


@pytest.mark.parametrize("whole", [True, False])
def test_gradients_that_are_asked_for_before_the_backward(ranks, whole):
    ranks(2).run(looks_first, whole)


WRAPS = {
    "ddp": DDP, "views": partial(DDP, gradient_as_bucket_view=True),
    "find_unused": partial(DDP, find_unused_parameters=True), "static": partial(DDP, static_graph=True),
    "replicate": replicate, "replicate, static": partial(replicate, static_graph=True),
}  # fmt: skip
STATIC = {"static", "replicate, static"}
ALL = [0, 1, 2]


def by_hand(wrap: str, uses: list[list[int]]) -> None:
    """Held backwards and `sync_gradients`, twice; `uses` has the heads of each rank, and none for an idle rank."""
    rank, size = dist.get_rank(), dist.get_world_size()
    home, optimizer = wrapped(wrap)
    if wrap in STATIC:  # a window of its own, in which it learns the graph: head 2 is not in it
        step = accumulating(steps=1)(heads_step)
        step(home, optimizer, micro_batch(rank, 9), [0, 1])
        optimizer.seen.clear()
    for _ in range(2):
        with gradsync.no_sync(home):
            if uses[rank]:
                home(micro_batch(rank, 0), uses[rank]).square().mean().backward()
        gradsync.sync_gradients(home)
        optimizer.step()
        optimizer.zero_grad()
    [mean] = gradients([[(r, 0, uses[r]) for r in range(size) if uses[r]]])
    share = sum(map(bool, uses)) / size
    expected = [None if gradient is None else gradient * share for gradient in mean]
    assert any(gradient is None for gradient in expected)
    assert_equal_updates(optimizer.seen, [expected] * 2)


@pytest.mark.parametrize("wrap", WRAPS)
@pytest.mark.parametrize("uses", [[[0], [0]], [[0], [1]], [[1, 0], []], [[], [2]], [[2], [0], []]])
def test_sync_gradients_leaves_none_what_no_rank_used(ranks, wrap, uses):
    """Ranks may use different heads, or none; what none of them used keeps None, and weight decay does not move it."""
    ranks(len(uses)).run(by_hand, wrap, uses)


def by_calls(step, items, call) -> None:
    for item in items:
        call(item)


def by_calls_and_flush(step, items, call) -> None:
    by_calls(step, items, call)
    step.flush()


def by_over(step, items, call) -> None:
    for item in step.over(items):
        call(item)


def closed(wrap: str, closing, uses: list[list[list[int]]], errs: bool) -> str:
    """A window that closes without a backward on some rank; `uses` has the heads by rank and micro-batch.

    Micro-batches without heads are dropped by `skip`. Returns "", or the words of the error.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    home, optimizer = wrapped(wrap)
    step = accumulating(steps=2, skip=ZeroDivisionError)(heads_step)
    windows = [[[[0, 1] if wrap in STATIC else ALL] * 2] * size, uses]
    try:
        for number, (window, run) in enumerate(zip(windows, [by_calls, closing])):
            items = [(micro_batch(rank, 2 * number + i), heads) for i, heads in enumerate(window[rank])]
            run(step, items, lambda item: step(home, optimizer, *item))
    except gradsync.GradSyncError as error:
        return str(error)
    finally:
        assert all(parameter.grad is None for parameter in home.parameters())
    expected = gradients(
        [(r, 2 * n + i, heads) for r in range(size) for i, heads in enumerate(window[r]) if heads]
        for n, window in enumerate(windows)
    )
    if not errs:  # the others drop the window, too, as `skip` has them hear of it
        assert_equal_updates(optimizer.seen, expected)
    return ""


@pytest.mark.parametrize("wrap", ["ddp", "views", "replicate"])
@pytest.mark.parametrize(
    ("closing", "uses", "errs"),
    [
        (by_calls_and_flush, [[[0]], [[0]]], [True, True]),
        (by_calls_and_flush, [[[0]], [ALL]], [True, False]),
        (by_calls_and_flush, [[[0]], []], [True, False]),
        (by_calls_and_flush, [[[0]]], [True]),
        (by_calls, [[[0], []], [[0], []]], [True, True]),
        (by_calls, [[[0, 1], []], [[0], ALL]], [True, False]),
        (by_over, [[[0]], [[0], [1]]], [True, True]),
    ],
)
def test_an_unused_parameter_is_an_error_where_a_window_closes_without_a_backward(ranks, wrap, closing, uses, errs):
    for text, wrong in zip(ranks(len(uses)).run(closed, wrap, closing, uses, True), errs, strict=True):
        assert ("no micro-batch of the window used heads." in text and "find_unused_parameters=True" in text) == wrong


@pytest.mark.parametrize("wrap", ["ddp", "views", "find_unused", "replicate", "static"])
@pytest.mark.parametrize(
    ("closing", "uses"),
    [
        (by_calls, [[[0], ALL], [[1], [0, 2]]]),
        (by_calls_and_flush, [[ALL], []]),
        (by_calls, [[[], []], [[0], [1, 2]]]),
        (by_calls, [[ALL, []], [[], ALL]]),
        (by_over, [[ALL], [[0, 1], [1, 2]]]),
        (by_over, [[], [[0, 1], [1, 2]]]),
    ],
)
def test_a_rank_without_a_micro_batch_in_the_window_raises_nothing(ranks, wrap, closing, uses):
    """Nor does one whose micro-batches used everything together."""
    if wrap in STATIC:
        uses = [[[head for head in heads if head < 2] for heads in mine] for mine in uses]
    assert ranks(2).run(closed, wrap, closing, uses, False) == ["", ""]


def of_two(order: list[int], calls: int) -> str:
    """One step with two DDPs, of which this rank's window uses one only."""
    rank = dist.get_rank()
    models = [small_model(), nn.Linear(3, 2).double()]
    homes, optimizer = [DDP(models[i]) for i in order], Recorder([p for model in models for p in model.parameters()])
    step = accumulating(steps=2)(lambda one, other, optimizer, x: mean_loss((one, other)[order.index(0)], x))
    try:
        for i in range(calls):
            step(*homes, optimizer, micro_batch(rank, i))
        step.flush()
    except gradsync.GradSyncError as error:
        return str(error)
    return f"no error, but {optimizer.seen[0][-1]}"


@pytest.mark.parametrize("order", [[0, 1], [1, 0]])
@pytest.mark.parametrize("calls", [2, 1], ids=["boundary", "flush"])
def test_a_ddp_that_the_window_does_not_use_at_all_is_an_error(ranks, order, calls):
    for text in ranks(2).run(of_two, order, calls):
        assert "no micro-batch of the window used weight, bias" in text


def of_static(wrap: str, windows: list[list[list[list[int]]]], steps: int = 2) -> list[str]:
    """Windows of a static graph, which has heads by rank and micro-batch; how each ended."""
    rank, size = dist.get_rank(), dist.get_world_size()
    home, optimizer = wrapped(wrap)
    step = accumulating(steps=steps)(heads_step)
    said = []
    for number, window in enumerate(windows):
        optimizer.seen.clear()
        try:
            for i, heads in enumerate(window[rank]):
                step(home, optimizer, micro_batch(rank, steps * number + i), heads)
            step.flush()
        except gradsync.GradSyncError as error:
            said.append(str(error))
            optimizer.zero_grad()
            continue
        [expected] = gradients([[(r, steps * number + i, h) for r in range(size) for i, h in enumerate(window[r])]])
        assert_equal_updates(optimizer.seen, [expected])
        said.append("exact")
    return said


AB, A, B = [0, 1], [0], [1]


@pytest.mark.parametrize("wrap", ["static", "replicate, static"])
@pytest.mark.parametrize(
    ("first", "then", "words"),
    [
        ([AB, AB], [A, A], "used heads.1.weight"),
        ([AB, AB], [A], "used heads.1.weight"),
        ([A, A], [B, A], "heads.1.weight"),
        ([A, A], [[0, 1], A], "heads.1.weight"),
        ([A, A], [AB], "heads.1.weight"),
    ],
)
def test_a_static_graph_that_changes_is_an_error(ranks, wrap, first, then, words):
    """Where torch raises it, and where torch says nothing; the graph of the first window is right again after it."""
    for said in ranks(2).run(of_static, wrap, [[first] * 2, [then] * 2, [first] * 2]):
        assert said[0] == said[2] == "exact" and words in said[1] and "static_graph" in said[1], said


@pytest.mark.parametrize("wrap", ["static", "replicate, static"])
def test_a_static_graph_that_changes_within_its_first_window_is_an_error(ranks, wrap):
    for said in ranks(2).run(of_static, wrap, [[[A, AB, A]] * 2, [[A, A]] * 2], 3):
        assert "heads.1.weight" in said[0] and "static_graph" in said[0] and said[1] == "exact", said


@pytest.mark.parametrize("wrap", ["static", "replicate, static"])
@pytest.mark.parametrize(
    "windows",
    [
        [[[A, A], [B, B]], [[A, A], [B, B]], [[A], [B]], [[A, A], [B, B]]],  # its own graph on each rank
        [[[A, A], [AB, AB]], [[A], [AB]], [[], [AB]], [[A, A], [AB, AB]]],
        [[[AB, AB], [AB, AB]], [[A, AB], [AB, AB]], [[AB, A], [B, AB]], [[AB], []]],  # less in one micro-batch
    ],
)
def test_a_static_graph_that_is_the_same_is_exact(ranks, wrap, windows):
    for said in ranks(2).run(of_static, wrap, windows):
        assert said == ["exact"] * len(windows), said


def beside_fsdp(overlapped: bool) -> str:
    """The second rank has nothing in the last window: beside FSDP it repeats a call; with overlap it runs none."""
    rank = dist.get_rank()
    torch.manual_seed(5)
    first, model = nn.Linear(3, 3).double(), Heads()
    home, optimizer = DDP(model), Recorder([*model.parameters()] if overlapped else [*first.parameters(), *model.parameters()])

    @accumulating(steps=2, overlap=int(overlapped))
    def step(first, home, optimizer, x, uses):
        return home(x if overlapped else first(x), uses).square().mean()

    sharded = None if overlapped else fully_shard(first)
    uses = [ALL, [0], [0, 1], [2]] if rank == 0 else [ALL, [0]]
    try:
        for i in step.over(range(len(uses))):
            step(sharded, home, optimizer, micro_batch(rank, i), uses[i])
    except gradsync.GradSyncError as error:
        return str(error)
    step.settle()
    assert step.progress.updates == 2
    return ""


@pytest.mark.parametrize("overlapped", [False, True])
def test_a_rank_that_has_run_out_raises_nothing_beside_fsdp_and_with_overlap(ranks, overlapped):
    assert ranks(2).run(beside_fsdp, overlapped) == ["", ""]


def known_to_torch_first() -> list[str]:
    """A static graph that torch's own loop began: less than it, where no backward closes the window."""
    rank = dist.get_rank()
    home, optimizer = wrapped("static")
    home(micro_batch(rank, 0), AB).square().mean().backward()
    optimizer.zero_grad()
    step, said = accumulating(steps=2)(heads_step), []
    for heads in (AB, A, AB):
        try:
            step(home, optimizer, micro_batch(rank, 1), heads)
            step.flush()
            said.append("")
        except gradsync.GradSyncError as error:
            said.append(str(error))
    return said


def test_a_static_graph_that_changes_after_a_loop_of_torchs_own_is_an_error(ranks):
    for one, two, three in ranks(2).run(known_to_torch_first):
        assert one == three == "" and "used heads.1.weight, heads.1.bias, which the first" in two


def a_first_backward_that_fails(skip: bool):
    model = DDP(small_model(unused=False), static_graph=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    @accumulating(steps=2, skip=ArithmeticError if skip else ())
    def step(model, optimizer, x, fails):
        loss = mean_loss(model, x)
        return Trap.apply(loss, ArithmeticError()) if fails else loss

    def run() -> None:
        with contextlib.nullcontext() if skip else contextlib.suppress(ArithmeticError):
            step(model, optimizer, micro_batch(dist.get_rank(), 0), fails=True)
        step(model, optimizer, micro_batch(dist.get_rank(), 1), fails=False)

    return verdict(run)


@pytest.mark.parametrize("skip", [True, False])
def test_a_static_graph_whose_very_first_backward_fails_is_an_error(ranks, skip):
    """torch knows half of the graph then, and ended the process in a later backward."""
    said = verdicts(ranks(2), a_first_backward_that_fails, skip)
    refused(said, "very first backward of a DDP with static_graph=True must succeed")
