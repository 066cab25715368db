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
from tests.changes.rule import LIMIT
from tests.support.models import small_model
from tests.support.reference import mean_loss, micro_batch


def home_of(kind: str, model: nn.Module) -> nn.Module:
    if kind == "ddp":
        return DDP(model)
    if kind == "fsdp1":
        return FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)
    if kind == "fsdp2":
        fully_shard(model[0])
        fully_shard(model[2])
        return fully_shard(model)
    return model


def loss_of(model, x, *_):
    return mean_loss(model, x)


class Batch:
    """Something that can be asked whether it is still there, around a tensor that can, too."""

    def __init__(self, x: torch.Tensor) -> None:
        self.x = x


def alive(refs: dict[str, weakref.ref]) -> list[str]:
    """The names of what is still there once the collector has been: twice, for what the first round resurrects."""
    gc.collect()
    gc.collect()
    return [name for name, ref in refs.items() if ref() is not None]


def by_function(step, kind: str, how: str, lengths: list[int]) -> dict[str, weakref.ref]:
    """Everything of a run as weak references; nothing of it is held when this returns."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    model = home_of(kind, small_model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    refs = {"model": weakref.ref(model), "optimizer": weakref.ref(optimizer)}
    refs |= {f"parameter {n}": weakref.ref(p) for n, p in model.named_parameters()}
    batches = [Batch(micro_batch(rank, i)) for i in range(lengths[rank])]
    refs |= {f"batch {i}": weakref.ref(b) for i, b in enumerate(batches)}
    refs |= {f"tensor of batch {i}": weakref.ref(b.x) for i, b in enumerate(batches)}
    if how == "over":
        for b in step.over(batches):
            step(model, optimizer, b)
    elif how == "over an iterator":
        for b in step.over(iter(batches)):
            step(model, optimizer, b)
    elif how == "calls":
        for b in batches:
            step(model, optimizer, b)
        step.flush()
    else:
        iterable = batches if how == "sync_every with an iterable" else None
        steps = gradsync.sync_every(model, 3, iterable)
        for one in steps:
            micro, b = one if iterable is not None else (one, batches[one.index + 3 * one.window])
            micro.backward(mean_loss(model, b.x))
            if micro.last:
                optimizer.step()
                optimizer.zero_grad()
                if iterable is None and micro.window == 1:
                    break
        steps.close() if hasattr(steps, "close") else None
    return refs


HOWS = ["calls", "over", "over an iterator", "sync_every", "sync_every with an iterable"]


def dropped(kind: str, how: str, lengths: list[int]) -> list[str]:
    """The function lives on; what it was called with is gone."""
    step = accumulating(steps=3)(lambda model, optimizer, b: mean_loss(model, b.x))
    before = dist.get_world_size() if dist.is_initialized() else 1
    refs = by_function(step, kind, how, lengths)
    left = alive(refs)
    assert before and step is not None
    return left


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("kind", ["bare", "ddp", "fsdp1", "fsdp2"])
def test_a_dropped_model_is_freed_with_its_optimizer_and_batches(ranks, kind, how):
    assert ranks(2).run(dropped, kind, how, [6, 6], limit=LIMIT) == [[], []]


@pytest.mark.parametrize("how", ["over", "over an iterator", "sync_every with an iterable"])
@pytest.mark.parametrize("kind", ["bare", "ddp", "fsdp1", "fsdp2"])
def test_a_rank_that_ran_out_frees_its_last_batch_too(ranks, kind, how):
    """That is the batch which its replays were made of."""
    assert ranks(2).run(dropped, kind, how, [7, 2], limit=LIMIT) == [[], []]


@pytest.mark.parametrize("how", HOWS)
def test_on_one_rank_everything_is_freed(how):
    assert dropped("bare", how, [6]) == []


def at_once(kind: str, how: str) -> list[str]:
    """What is still there of a model behind its loops, before a collection."""

    step = accumulating(steps=3)(lambda model, optimizer, x: mean_loss(model, x))

    def loop() -> list[weakref.ref]:
        model = home_of(kind, small_model())
        refs = [weakref.ref(one) for one in (model, *model.parameters())]
        if how.startswith("over"):
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for index, x in enumerate(step.over(iter(X) if "iterator" in how else X)):
                step(model, optimizer, x)
                if "break" in how and index == 2:
                    break
            return refs
        steps = gradsync.sync_every(model, 3)
        for micro, x in zip(steps, X) if how == "zipped" else gradsync.sync_every(model, 3, iter(X) if how == "iterator" else X):
            mean_loss(model, x).backward() if how == "plain" else micro.backward(mean_loss(model, x))
            if micro.last:
                model.zero_grad()
            if how == "break" and micro.window:
                break
        kept.append(micro)
        return refs

    kept: list = []
    loop()  # what torch imports at first may keep some frames
    gc.collect()
    gc.disable()
    try:
        return [type(left).__name__ for ref in loop() if (left := ref()) is not None]
    finally:
        gc.enable()


X = [micro_batch(0, i) for i in range(7)]


HOWS = ["sized", "iterator", "zipped", "plain", "break", "over", "over, iterator", "over, break"]


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize(("kind", "size"), [("bare", 1), ("bare", 2), ("ddp", 2)])
def test_a_loop_leaves_no_cycles_with_the_model_in_them(ranks, kind, size, how):
    """Parameters that wait for a collection are memory that the next model does not have."""
    assert ranks(size).run(at_once, kind, how) == [[]] * size


def last_batch(kind: str) -> list[str]:
    """The model lives on; the batches of a loop that has ended do not."""
    rank = dist.get_rank()
    model = home_of(kind, small_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = accumulating(steps=3)(lambda model, optimizer, b: mean_loss(model, b.x))

    def loop(length: int) -> dict[str, weakref.ref]:
        batches = [Batch(micro_batch(rank, i)) for i in range(length)]
        refs = {f"batch {i}": weakref.ref(b) for i, b in enumerate(batches)}
        refs |= {f"tensor {i}": weakref.ref(b.x) for i, b in enumerate(batches)}
        for b in step.over(batches):
            step(model, optimizer, b)
        return refs

    left = alive(loop([6, 6][rank]))
    return left + alive(loop([7, 2][rank]))


@pytest.mark.parametrize("kind", ["bare", "ddp", "fsdp1", "fsdp2"])
def test_the_last_batch_is_freed_with_its_loop(ranks, kind):
    assert ranks(2).run(last_batch, kind, limit=LIMIT) == [[], []]


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


def fifty_functions(kind: str, how: str) -> list:
    """A function defined in each epoch, all on one model and optimizer."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    model = home_of(kind, small_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    counts, functions = [], []
    for epoch in range(50):
        if how == "accumulating":
            step = accumulating(steps=2)(lambda model, optimizer, x: mean_loss(model, x))
            for x in step.over([micro_batch(rank, i) for i in range(2)]):
                step(model, optimizer, x)
            functions.append(weakref.ref(step))
            del step
        else:
            for micro, x in gradsync.sync_every(model, 2, [micro_batch(rank, i) for i in range(2)]):
                micro.backward(mean_loss(model, x))
                if micro.last:
                    optimizer.step()
                    optimizer.zero_grad()
        if epoch in {1, 49}:
            gc.collect()
            counts.append(hooks_of(optimizer, model))
    assert not [ref for ref in functions if ref() is not None], "functions live on"
    return [key for key in counts[1] if counts[1][key] > counts[0].get(key, 0)]


@pytest.mark.parametrize("how", ["accumulating", "sync_every"])
@pytest.mark.parametrize("kind", ["bare", "ddp", "fsdp2"])
def test_functions_that_die_leave_no_hooks(ranks, kind, how):
    assert ranks(2).run(fifty_functions, kind, how, limit=LIMIT) == [[], []]
    if kind == "bare":
        assert fifty_functions(kind, how) == []


def no_function_left(kind: str) -> dict[str, int]:
    """One function that has died leaves its optimizer as it was found."""
    model = home_of(kind, small_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = {key: n for key, n in hooks_of(optimizer, nn.Module()).items() if n}
    step = accumulating(steps=1)(lambda model, optimizer, x: mean_loss(model, x))
    step(model, optimizer, micro_batch(0, 0))
    del step
    gc.collect()
    return {key: n for key, n in hooks_of(optimizer, nn.Module()).items() if n - before.get(key, 0)}


def test_a_function_that_died_leaves_nothing_on_the_optimizer(ranks):
    assert no_function_left("bare") == {}
    for kind in ("bare", "ddp", "fsdp2"):
        assert ranks(2).run(no_function_left, kind, limit=LIMIT) == [{}, {}]


def resources() -> dict[str, int]:
    gc.collect()
    return {
        "groups": len(dist.distributed_c10d._world.pg_map),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "python threads": threading.active_count(),
    }


def many_epochs(kind: str, how: str, epochs: int) -> dict[str, int]:
    """What the last epochs have added to what the first ones made."""
    rank = dist.get_rank()
    model = small_model()
    if kind == "hsdp x tp":
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

        mesh = init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("replicate", "shard", "tp"))
        model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
        parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        model = fully_shard(model, mesh=mesh["replicate", "shard"])
        rank //= 2
    else:
        model = home_of(kind, model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = accumulating(steps=2)(lambda model, optimizer, x: mean_loss(model, x))
    first: dict[str, int] = {}
    for epoch in range(epochs):
        items = [micro_batch(rank, i) for i in range(3)]
        if how == "sync_every":
            for micro, x in gradsync.sync_every(model, 2, items):
                micro.backward(mean_loss(model, x))
                if micro.last:
                    optimizer.step()
                    optimizer.zero_grad()
        else:
            for x in step.over(items if how == "over" else iter(items)):
                step(model, optimizer, x)
        if epoch == 2:
            first = resources()
    last = resources()
    return {key: last[key] - first[key] for key in last if last[key] > first[key]}


@pytest.mark.parametrize("how", ["sync_every", "over", "over an iterator"])
@pytest.mark.parametrize("kind", ["bare", "ddp", "fsdp1", "fsdp2"])
def test_an_epoch_more_makes_no_process_group_thread_or_descriptor(ranks, kind, how):
    assert ranks(2).run(many_epochs, kind, how, 8, limit=LIMIT) == [{}, {}]


@pytest.mark.parametrize("how", ["sync_every", "over"])
def test_an_epoch_more_with_hsdp_and_tensor_parallel(ranks, how):
    assert ranks(4).run(many_epochs, "hsdp x tp", how, 6, limit=30) == [{}] * 4


def groups_of_models(count: int) -> dict[str, int]:
    """Models that come and go: what was made for the dead is not kept."""
    rank = dist.get_rank()
    first: dict[str, int] = {}
    for number in range(count):
        model = small_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        step = accumulating(steps=2)(lambda model, optimizer, x: mean_loss(model, x))
        for x in step.over(iter([micro_batch(rank, i) for i in range(3)])):
            step(model, optimizer, x)
        del model, optimizer, step
        if number == 2:
            first = resources()
    last = resources()
    return {key: last[key] - first[key] for key in last if last[key] > first[key]}


def test_models_that_come_and_go_make_no_groups_each(ranks):
    assert ranks(2).run(groups_of_models, 8, limit=LIMIT) == [{}, {}]
