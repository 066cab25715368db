"""What is dropped is freed, with its last batch; what is used for long grows by nothing."""

from __future__ import annotations

import gc
import os
import threading
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP

import gradsync
from gradsync import accumulating
from tests.changes.rule import LIMIT, my_rank, outcomes
from tests.support.models import small_model
from tests.support.reference import mean_loss, micro_batch


# -- models -------------------------------------------------------------------------------------------------------


def bare() -> nn.Module:
    return small_model()


def ddp() -> nn.Module:
    return DDP(small_model())


def fsdp1() -> nn.Module:
    return FullyShardedDataParallel(small_model(), device_id=torch.device("cpu"), use_orig_params=True)


def fsdp2() -> nn.Module:
    model = small_model()
    fully_shard(model[0])
    fully_shard(model[2])
    return fully_shard(model)


def hsdp_and_tensor_parallel() -> nn.Module:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("replicate", "shard", "tp"))
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    return fully_shard(model, mesh=mesh["replicate", "shard"])


MODELS = [bare, ddp, fsdp1, fsdp2]


# -- loops: each trains on all batches, and returns what its user might keep of it ------------------------------------


class Batch:
    """Something that can be asked whether it is still there, around a tensor that can, too."""

    def __init__(self, x: torch.Tensor) -> None:
        self.x = x


def batches_of(rank: int, length: int) -> list[Batch]:
    return [Batch(micro_batch(rank, i)) for i in range(length)]


def calls(step, model, optimizer, batches, steps=3) -> None:
    for b in batches:
        step(model, optimizer, b)
    step.flush()


def over(step, model, optimizer, batches, steps=3) -> None:
    for b in step.over(batches):
        step(model, optimizer, b)


def over_an_iterator(step, model, optimizer, batches, steps=3) -> None:
    over(step, model, optimizer, iter(batches))


def over_and_break(step, model, optimizer, batches, steps=3) -> None:
    for index, b in enumerate(step.over(batches)):
        step(model, optimizer, b)
        if index == 2:
            break


def update_at_last(micro, optimizer) -> None:
    if micro.last:
        optimizer.step()
        optimizer.zero_grad()


def in_pairs(pairs, model, optimizer):
    for micro, b in pairs:
        micro.backward(mean_loss(model, b.x))
        update_at_last(micro, optimizer)
    return micro


def sync_every(step, model, optimizer, batches, steps=3):
    return in_pairs(gradsync.sync_every(model, steps, batches), model, optimizer)


def sync_every_an_iterator(step, model, optimizer, batches, steps=3):
    return sync_every(step, model, optimizer, iter(batches), steps)


def sync_every_zipped(step, model, optimizer, batches, steps=3):
    return in_pairs(zip(gradsync.sync_every(model, steps), batches), model, optimizer)


def sync_every_without_batches(step, model, optimizer, batches, steps=3):
    micro_steps = gradsync.sync_every(model, steps)
    for b in batches:
        micro = next(micro_steps)
        micro.backward(mean_loss(model, b.x))
        update_at_last(micro, optimizer)
    micro_steps.close()
    return micro


def sync_every_and_plain_backward(step, model, optimizer, batches, steps=3):
    for micro, b in gradsync.sync_every(model, steps, batches):
        mean_loss(model, b.x).backward()
        update_at_last(micro, optimizer)
    return micro


def sync_every_and_break(step, model, optimizer, batches, steps=3):
    for micro, b in gradsync.sync_every(model, steps, batches):
        micro.backward(mean_loss(model, b.x))
        update_at_last(micro, optimizer)
        if micro.window:
            break
    return micro


# -- what is dropped ----------------------------------------------------------------------------------------------


def alive(refs: dict[str, weakref.ref]) -> list[str]:
    """The names of what is still there once the collector has been: twice, for what the first round resurrects."""
    gc.collect()
    gc.collect()
    return [name for name, ref in refs.items() if ref() is not None]


def refs_of(batches: list[Batch]) -> dict[str, weakref.ref]:
    refs = {f"batch {i}": weakref.ref(b) for i, b in enumerate(batches)}
    return refs | {f"tensor of batch {i}": weakref.ref(b.x) for i, b in enumerate(batches)}


def function(steps: int):
    return accumulating(steps=steps)(lambda model, optimizer, b: mean_loss(model, b.x))


def by_function(step, make, loop, lengths: list[int]) -> dict[str, weakref.ref]:
    """Everything of a run as weak references; nothing of it is held when this returns."""
    rank = my_rank()
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    refs = {"model": weakref.ref(model), "optimizer": weakref.ref(optimizer)}
    refs |= {f"parameter {n}": weakref.ref(p) for n, p in model.named_parameters()}
    batches = batches_of(rank, lengths[rank])
    refs |= refs_of(batches)
    loop(step, model, optimizer, batches)
    return refs


def dropped(make, loop, lengths: list[int]) -> list[str]:
    """The function lives on; what it was called with is gone."""
    step = function(3)
    return alive(by_function(step, make, loop, lengths))


LOOPS = [calls, over, over_an_iterator, sync_every_without_batches, sync_every]


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("make", MODELS)
def test_a_dropped_model_is_freed_with_its_optimizer_and_batches(ranks, make, loop):
    assert ranks(2).run(dropped, make, loop, [6, 6], limit=LIMIT) == [[], []]


@pytest.mark.parametrize("loop", [over, over_an_iterator, sync_every])
@pytest.mark.parametrize("make", MODELS)
def test_a_rank_that_ran_out_frees_its_last_batch_too(ranks, make, loop):
    """That is the batch which its replays were made of."""
    assert ranks(2).run(dropped, make, loop, [7, 2], limit=LIMIT) == [[], []]


@pytest.mark.parametrize("loop", LOOPS)
def test_on_one_rank_everything_is_freed(loop):
    assert dropped(bare, loop, [6]) == []


def at_once(make, loop) -> list[str]:
    """What is still there of a model behind its loops, before a collection."""
    step, kept = function(3), []

    def once() -> list[weakref.ref]:
        model = make()
        kept.append(loop(step, model, torch.optim.SGD(model.parameters(), lr=0.1), batches_of(0, 7)))
        return [weakref.ref(one) for one in (model, *model.parameters())]

    once()  # what torch imports at first may keep some frames
    gc.collect()
    gc.disable()
    try:
        return [type(left).__name__ for ref in once() if (left := ref()) is not None]
    finally:
        gc.enable()


@pytest.mark.parametrize("loop", [
    sync_every, sync_every_an_iterator, sync_every_zipped, sync_every_and_plain_backward, sync_every_and_break,
    over, over_an_iterator, over_and_break,
])  # fmt: skip
@pytest.mark.parametrize(("make", "size"), [(bare, 1), (bare, 2), (ddp, 2)])
def test_a_loop_leaves_no_cycles_with_the_model_in_them(ranks, make, size, loop):
    """Parameters that wait for a collection are memory that the next model does not have."""
    assert ranks(size).run(at_once, make, loop) == [[]] * size


def last_batch(make) -> list[str]:
    """The model lives on; the batches of a loop that has ended do not."""
    rank, model, step = my_rank(), make(), function(3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def loop(length: int) -> dict[str, weakref.ref]:
        batches = batches_of(rank, length)
        over(step, model, optimizer, batches)
        return refs_of(batches)

    left = alive(loop([6, 6][rank]))
    return left + alive(loop([7, 2][rank]))


@pytest.mark.parametrize("make", MODELS)
def test_the_last_batch_is_freed_with_its_loop(ranks, make):
    assert ranks(2).run(last_batch, make, limit=LIMIT) == [[], []]


# -- what is used for long ----------------------------------------------------------------------------------------


def hooks_of(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, int]:
    """How many hooks hang on an optimizer and a model."""
    found = {name: len(value) for name, value in vars(optimizer).items() if "hook" in name and hasattr(value, "__len__")}
    for place, module in enumerate(model.modules()):
        found |= {
            f"{place}.{name}": len(value)
            for name, value in vars(module).items()
            if "hook" in name and hasattr(value, "__len__")
        }
    for place, parameter in enumerate(model.parameters()):
        found[f"parameter {place}"] = len(parameter._backward_hooks or ())
        found[f"parameter {place}, post"] = len(parameter._post_accumulate_grad_hooks or ())
    return found


def fifty_functions(make, loop) -> list:
    """A function defined in each epoch, all on one model and optimizer."""
    rank, model = my_rank(), make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    counts, functions = [], []
    for epoch in range(50):
        step = function(2)
        loop(step, model, optimizer, batches_of(rank, 2), 2)
        functions.append(weakref.ref(step))
        del step
        if epoch in {1, 49}:
            gc.collect()
            counts.append(hooks_of(optimizer, model))
    assert not [ref for ref in functions if ref() is not None], "functions live on"
    return [key for key in counts[1] if counts[1][key] > counts[0].get(key, 0)]


@pytest.mark.parametrize("loop", [over, sync_every])
@pytest.mark.parametrize(("make", "size"), [(bare, 1), (bare, 2), (ddp, 2), (fsdp2, 2)])
def test_functions_that_die_leave_no_hooks(ranks, make, size, loop):
    assert outcomes(ranks, size, fifty_functions, make, loop) == [[]] * size


def no_function_left(make) -> dict[str, int]:
    """One function that has died leaves its optimizer as it was found."""
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = {key: n for key, n in hooks_of(optimizer, nn.Module()).items() if n}
    step = function(1)
    step(model, optimizer, Batch(micro_batch(0, 0)))
    del step
    gc.collect()
    return {key: n for key, n in hooks_of(optimizer, nn.Module()).items() if n - before.get(key, 0)}


def test_a_function_that_died_leaves_nothing_on_the_optimizer(ranks):
    assert no_function_left(bare) == {}
    for make in (bare, ddp, fsdp2):
        assert ranks(2).run(no_function_left, make, limit=LIMIT) == [{}, {}]


def resources() -> dict[str, int]:
    gc.collect()
    return {
        "groups": len(dist.distributed_c10d._world.pg_map),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "python threads": threading.active_count(),
    }


def many_epochs(make, loop, epochs: int, sharing: int = 1) -> dict[str, int]:
    """What the last epochs have added to what the first ones made; so many ranks are `sharing` their batches."""
    rank, model, step = my_rank() // sharing, make(), function(2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    first: dict[str, int] = {}
    for epoch in range(epochs):
        loop(step, model, optimizer, batches_of(rank, 3), 2)
        if epoch == 2:
            first = resources()
    last = resources()
    return {key: last[key] - first[key] for key in last if last[key] > first[key]}


@pytest.mark.parametrize("loop", [sync_every, over, over_an_iterator])
@pytest.mark.parametrize("make", MODELS)
def test_an_epoch_more_makes_no_process_group_thread_or_descriptor(ranks, make, loop):
    assert ranks(2).run(many_epochs, make, loop, 8, limit=LIMIT) == [{}, {}]


@pytest.mark.parametrize("loop", [sync_every, over])
def test_an_epoch_more_with_hsdp_and_tensor_parallel(ranks, loop):
    assert ranks(4).run(many_epochs, hsdp_and_tensor_parallel, loop, 6, 2, limit=30) == [{}] * 4


def groups_of_models(count: int) -> dict[str, int]:
    """Models that come and go: what was made for the dead is not kept."""
    rank = my_rank()
    first: dict[str, int] = {}
    for number in range(count):
        model = small_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        step = function(2)
        over_an_iterator(step, model, optimizer, batches_of(rank, 3))
        del model, optimizer, step
        if number == 2:
            first = resources()
    last = resources()
    return {key: last[key] - first[key] for key in last if last[key] > first[key]}


def test_models_that_come_and_go_make_no_groups_each(ranks):
    assert ranks(2).run(groups_of_models, 8, limit=LIMIT) == [{}, {}]
