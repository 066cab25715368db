"""Process groups that come, end and come again, and models of one step on groups of their own."""

from __future__ import annotations

import os
import socket
import traceback

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

import gradsync
from gradsync import GradSyncError, LossSum, accumulating
from tests.changes.rule import LIMIT, Net, NotExact, Outcome, Run, compare, exact_or_error, layer, sum_of_models, told
from tests.support.ranks import GROUP_TIMEOUT
from tests.support.models import small_model
from tests.support.reference import micro_batch

HOWS = ["accumulating", "accumulating anew", "sync_every", "sync_every anew"]


def begin_group(store: str, rank: int, size: int) -> None:
    """A group that ends within the test's limit, whatever waits in it."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=GROUP_TIMEOUT)


@pytest.fixture
def stores(tmp_path):
    """Names of files that groups may meet at."""
    return [str(tmp_path / str(number)) for number in range(4)]


# -- a group that comes after the first window, or again ----------------------------------------------------------


def alone_first(stores: list[str], how: str, wrap: str, steps: int) -> Outcome:
    """A first window without any process group, on rank 0's data everywhere; then there is a group."""
    rank, size = dist.get_rank(), dist.get_world_size()

    def story(run: Run) -> None:
        dist.destroy_process_group()
        run.train(1)  # `my_rank()` is 0 and `world_size()` is 1 here
        begin_group(stores.pop(0), rank, size)
        run.rewrap()
        run.train(3)

    return told(story, how, wrap, steps)


@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize(("how", "only"), [
    ("accumulating", "exact"), ("accumulating anew", "exact"), ("sync_every anew", "exact"),
    ("sync_every", ""),  # an iterator that began without a group may refuse
])  # fmt: skip
@pytest.mark.parametrize("wrap", ["bare", "ddp"])
def test_a_model_used_before_there_was_a_group(ranks, stores, wrap, how, only, steps):
    exact_or_error(ranks(2).run(alone_first, stores, how, wrap, steps, limit=LIMIT), only=only)


def a_second_group(stores: list[str], how: str, wrap: str, steps: int, rewrapped: bool) -> Outcome:
    rank, size = dist.get_rank(), dist.get_world_size()

    def story(run: Run) -> None:
        for _ in range(2):
            run.train(2)
            if rewrapped:
                run.rewrap()  # before the group ends, whose DDP it was
            run.end()
            dist.destroy_process_group()
            begin_group(stores.pop(0), rank, size)
        run.train(2)

    return told(story, how, wrap, steps)


@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize(("wrap", "anew", "only"), [("bare", False, "exact"), ("ddp", False, "error"), ("ddp", True, "exact")])
def test_the_same_model_in_a_second_group(ranks, stores, wrap, anew, only, how, steps):
    """An engine of gradsync's is made anew; a DDP of the user's on a group that has ended is an error."""
    exact_or_error(ranks(2).run(a_second_group, stores, how, wrap, steps, anew, limit=LIMIT), only=only)


def with_process_group(ports: list[int], how: str) -> Outcome:
    """The same through `gradsync.process_group`, as a notebook or a sweep does; alone in between."""
    rank, size = dist.get_rank(), dist.get_world_size()
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1"}
    left = iter(ports)

    def story(run: Run) -> None:
        dist.destroy_process_group()
        for _ in range(2):
            os.environ["MASTER_PORT"] = str(next(left))
            with gradsync.process_group(timeout=GROUP_TIMEOUT):
                run.train(2)
                run.end()
        os.environ["MASTER_PORT"] = str(next(left))
        dist.init_process_group("gloo", timeout=GROUP_TIMEOUT)
        run.train(1)

    try:
        return told(story, how, "bare", 2)
    finally:
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            os.environ.pop(name, None)


def free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


@pytest.mark.parametrize("how", HOWS)
def test_a_model_in_two_process_groups_one_after_the_other(ranks, how):
    exact_or_error(ranks(2).run(with_process_group, free_ports(6), how, limit=LIMIT), only="exact")


# -- groups of one step -------------------------------------------------------------------------------------------


def the_same_ranks(_: int) -> list[tuple]:
    """The groups of the two models, and who is in them: the second is as large as the first, and another object."""
    return [(dist.group.WORLD, [0, 1]), (dist.new_group([0, 1]), [0, 1])]


def other_ranks(rank: int) -> list[tuple]:
    pairs = [(dist.new_group(pair), pair) for pair in ([0, 1], [2, 3], [0, 2], [1, 3])]
    return [pairs[rank // 2], pairs[2 + rank % 2]]


class Means:
    """Each micro-batch weighs one."""

    num_rows = staticmethod(lambda rank, index: 4)
    weight = len  # of the outputs that a group had in a window

    @staticmethod
    def loss(total, count: int):
        return total

    @staticmethod
    def backward(micro, loss) -> None:
        micro.backward(loss)


class Sums:
    """Each number of an output weighs one."""

    num_rows = staticmethod(lambda rank, index: 2 + rank + index)
    weight = staticmethod(lambda outputs: sum(output.numel() for output in outputs))
    loss = LossSum

    @staticmethod
    def backward(micro, loss) -> None:
        micro.backward(loss.loss, count=loss.count)


def by_function(homes, optimizer, losses, loss_of, items: list, even: bool, updated) -> None:
    step = accumulating(steps=2)(lambda one, two, optimizer, x: loss_of(one, two, x))
    for i, x in enumerate(items if even else step.over(items)):
        step(*homes, optimizer, x)
        if i % 2:
            updated()
    step.flush()


def by_iterator(homes, optimizer, losses, loss_of, items: list, even: bool, updated) -> None:
    for micro, x in gradsync.sync_every(homes, 2, items):
        losses.backward(micro, loss_of(*homes, x))
        if micro.last:
            optimizer.step()
            optimizer.zero_grad()
            updated()


def two_groups(grouped, train, losses, lengths: list[int]) -> Outcome:
    """One step with two models, each averaged over its own group; with sums, each over its own group's counts."""
    rank, groups = dist.get_rank(), grouped(dist.get_rank())
    models, twins = (small_model(), layer(3, 2)), (small_model(), layer(3, 2))
    homes = [DDP(model, process_group=group) for model, (group, _) in zip(models, groups)]
    optimizer = torch.optim.SGD([p for model in models for p in model.parameters()], lr=0.1)

    def data(r: int, i: int) -> torch.Tensor:
        return micro_batch(r, i, rows=losses.num_rows(r, i))

    def by_hand() -> list[dict]:
        trace = []
        for start in range(0, max(lengths), 2):
            for model, (_, members) in zip(twins, groups):
                outputs = [model(data(r, i)) for r in members for i in range(start, min(start + 2, lengths[r]))]
                if not outputs:
                    continue
                total = sum(output.square().sum() for output in outputs)
                grads = torch.autograd.grad(total / losses.weight(outputs), list(model.parameters()))
                with torch.no_grad():
                    for p, g in zip(model.parameters(), grads):
                        p -= 0.1 * g
            trace.append(snapshot(twins))
        return trace

    def snapshot(both) -> dict:
        return {f"{k}.{n}": p.detach().clone() for k, m in enumerate(both) for n, p in m.named_parameters()}

    def loss_of(one, two, x):
        a, b = one(x), two(x)
        return losses.loss(a.square().sum() + b.square().sum(), a.numel())

    seen = []
    even = len(set(lengths)) == 1
    try:
        train(homes, optimizer, losses, loss_of, [data(rank, i) for i in range(lengths[rank])], even,
              lambda: seen.append(snapshot(models)))  # fmt: skip
        if even:
            compare(seen, by_hand())
        else:
            compare([snapshot(models)], by_hand()[-1:])
    except GradSyncError as error:
        return Outcome("error", str(error))
    except NotExact as parted:
        return Outcome("off", str(parted))
    except Exception:  # noqa: BLE001
        return Outcome("foreign", traceback.format_exc(limit=-3))
    return Outcome("exact")


@pytest.mark.parametrize("lengths", [[4, 4, 4, 4], [4, 2, 4, 4]])
@pytest.mark.parametrize("losses", [Means, Sums])
@pytest.mark.parametrize("train", [by_function, by_iterator])
@pytest.mark.parametrize(("grouped", "size"), [(the_same_ranks, 2), (other_ranks, 4)])
def test_two_ddps_of_one_step_on_groups_of_one_size(ranks, grouped, size, train, losses, lengths):
    exact_or_error(ranks(size).run(two_groups, grouped, train, losses, lengths[:size], limit=LIMIT))


# -- sync_gradients of a bare model -------------------------------------------------------------------------------


def never_seen(model) -> None:
    pass


def after_a_window(model) -> None:
    step = accumulating(steps=1)(lambda model, optimizer, x: sum_of_models(model, x))
    step(model, torch.optim.SGD(model.parameters(), lr=0.0), micro_batch(dist.get_rank(), 0))


def accumulated_alone(before) -> Outcome:
    """Backwards by hand on a model that nobody has put on an engine, then one call."""
    rank = dist.get_rank()
    run, twin = Net(), Net()
    for _ in range(2):
        before(run)
        for i in range(3):
            sum_of_models(run, micro_batch(rank, i)).backward()
        gradsync.sync_gradients(run)
        total = sum(sum_of_models(twin, micro_batch(r, i)) for r in range(2) for i in range(3)) / 2
        expected = torch.autograd.grad(total, list(twin.parameters()))
        for (name, p), g in zip(run.named_parameters(), expected):
            if p.grad is None or (p.grad - g).abs().max() > 1e-12:
                return Outcome("off", f"{name}: {None if p.grad is None else (p.grad - g).abs().max()}")
        run.zero_grad()
        run.head = layer(5, 3)  # and once more, edited
        twin.head = layer(5, 3)
    return Outcome("exact")


@pytest.mark.parametrize("before", [never_seen, after_a_window])
def test_sync_gradients_of_a_bare_model(ranks, before):
    exact_or_error(ranks(2).run(accumulated_alone, before, limit=LIMIT), only="exact")


def some_without() -> Outcome:
    """One rank has no gradient at all, and a parameter that nobody used stays None."""
    rank = dist.get_rank()
    model, twin = small_model(unused=True), small_model(unused=True)
    if rank == 0:
        sum_of_models(model, micro_batch(0, 0)).backward()
    gradsync.sync_gradients(model)
    (sum_of_models(twin, micro_batch(0, 0)) / 2).backward()
    for (name, p), q in zip(model.named_parameters(), twin.parameters()):
        if (p.grad is None) != (q.grad is None):
            return Outcome("off", f"{name}: {p.grad} where {q.grad} belongs")
        if q.grad is not None and (p.grad - q.grad).abs().max() > 1e-12:
            return Outcome("off", name)
    return Outcome("exact")


def test_sync_gradients_of_a_bare_model_with_unused_parameters_and_an_idle_rank(ranks):
    exact_or_error(ranks(2).run(some_without, limit=LIMIT))
