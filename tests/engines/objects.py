"""What runs on the ranks for test_objects.py: engines by themselves, without windows."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
import torch.distributed as dist

from gradsync import GradSyncError
from gradsync.engines import find
from tests.support.reference import mean_of as mean_loss
from tests.support.training import data
from tests.support.homes import Home, home_of, tensor_parallel
from tests.support.models import net


def hold(engines: list, shards: bool = False) -> list:
    return [engine.hold_shards() if shards else engine.hold() for engine in engines]


def restore(engines: list, found: list) -> None:
    for engine, one in zip(engines, found):
        engine.restore(one)


def window(home: Home, engines: list, shards: bool = False, num: int = 2) -> list:
    """The gradients of a window of `num` micro-batches, and how many collectives each of its groups ran."""
    groups = [group for group in dist.distributed_c10d._world.pg_map if dist.get_rank(group) >= 0]
    before = [group._get_sequence_number_for_group() for group in groups]
    for engine in engines:
        engine.trainable()
    for index in range(num):
        found = hold(engines, shards)
        loss = mean_loss(home.model(data(home.rank, index))) / num
        if index == num - 1:
            for engine in engines:
                engine.arm(loss)
        loss.backward()
        if index == num - 1:
            for engine in engines:
                engine.finish()
        restore(engines, found)
    gradients = [None if p.grad is None else p.grad.clone() for engine in engines for p in engine.parameters]
    counts = [group._get_sequence_number_for_group() - num for group, num in zip(groups, before)]
    for engine in engines:
        engine.discard()
    return [gradients, counts]


def dropped(name: str) -> None:
    """A model that knows its optimizer, and an engine that is kept by that optimizer: nobody else holds either."""
    home = home_of(name)
    model, shards = home.model, name == "hsdp_shard"
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.__dict__["its_optimizer"] = optimizer
    engines = find([model])
    kept = weakref.WeakKeyDictionary({optimizer: engines})
    window(home, engines, shards)
    batch = data(home.rank, 0)
    found = hold(engines, shards)
    loss = mean_loss(model(batch))
    if name.startswith("fsdp1"):
        loss.backward()  # else torch itself keeps the model
    restore(engines, found)
    ends = [weakref.ref(thing) for thing in (model, optimizer, batch)]
    del home, model, optimizer, engines, batch, loss, found
    gc.collect()
    assert [end() for end in ends] == [None] * 3, [end() for end in ends]
    assert not kept


def outlived(name: str) -> None:
    """An engine whose model is gone has nothing, and does nothing."""
    engines = find([home_of(name).model])
    gc.collect()
    for engine in engines:
        found = list(engine.parameters), list(engine.modules), engine.trainable()
        assert found == ([], [], False), found
        engine.restore(engine.hold())
        engine.discard()
        engine.ungather()


def one_group_a_mesh() -> None:
    home = tensor_parallel(net(), replica=2, data=1)
    groups = dist.distributed_c10d._world.pg_map
    before = len(groups)
    found = [find([home.model])[0].group for _ in range(3)]
    assert len(groups) <= before + 1 and found[0] is found[1] is found[2]
    assert dist.get_process_group_ranks(found[0]) == [dist.get_rank() % 2, dist.get_rank() % 2 + 2]
    other = tensor_parallel(net(), replica=2, data=1)  # which makes groups of its own for its meshes
    before = len(groups)
    assert find([other.model])[0].group is found[0] and len(groups) == before


def clean_after(name: str, where: str) -> None:
    """All ranks fail together; the next window gives the gradients of a fresh model, with as many collectives."""
    shards = name == "hsdp_shard"
    fresh = home_of(name)
    expected = window(fresh, find([fresh.model]), shards)[0], window(fresh, find([fresh.model]), shards)[1]
    home = home_of(name)
    engines = find([home.model])
    first = window(home, engines, shards)[0]  # a model's first forward has its own collectives
    for boundary in (False, True):
        for engine in engines:
            engine.trainable()
        found = hold(engines, shards)
        mean_loss(home.model(data(home.rank, 5))).backward()
        restore(engines, found)
        found = hold(engines, shards)
        home.net.second.fails = where
        with pytest.raises(ArithmeticError):
            loss = mean_loss(home.model(data(home.rank, 6)))
            if boundary:
                for engine in engines:
                    engine.arm(loss)
            if where == "between":
                raise ArithmeticError
            loss.backward()
        home.net.second.fails = ""
        for engine in engines:
            engine.abort()
        restore(engines, found)
        for engine in engines:
            engine.discard()
            assert not engine.num_held() and not engine.held_gradients()
            assert not any(state._comm_ctx.post_forward_order for state in engine._states), "gathered next in vain"
        assert all(p.grad is None for engine in engines for p in engine.parameters)
        gradients, counts = window(home, engines, shards)
        for mine, other, at_first in zip(gradients, expected[0], first, strict=True):
            assert (mine is None) == (other is None)
            assert mine is None or (torch.equal(mine, other) and torch.equal(mine, at_first))
        assert counts == expected[1], (boundary, counts, expected[1])


def shard_before_2_13() -> None:
    home = home_of("hsdp_window")
    (engine,) = find([home.model])
    for group in engine._groups:
        vars(group).pop("reduce_scatter_unused_params", None)
    with pytest.raises(GradSyncError, match='sync="shard" needs torch 2.13 or later .* this is torch'):
        engine.hold_shards()
    assert all(group.reduce_grads for group in engine._groups)


class Stream:
    """A stream that notes what it waits for, and what those had waited for by then."""

    def __init__(self, name: str) -> None:
        self.name, self.seen, self.work = name, {}, 0

    def run(self) -> tuple:
        self.work += 1
        self.seen[self.name] = self.work
        return self.name, self.work

    def wait_stream(self, other: Stream) -> None:
        for name, work in other.seen.items():
            self.seen[name] = max(work, self.seen.get(name, 0))

    def has_seen(self, work: tuple) -> bool:
        return self.seen.get(work[0], 0) >= work[1]


class Device:
    """What FSDP1 asks for streams, with `Stream`s in their place: a CPU has none, and so orders everything."""

    def __init__(self) -> None:
        self.current = [Stream("compute")]

    def current_stream(self) -> Stream:
        return self.current[-1]

    def stream(self, stream: Stream) -> Device:
        self.current.append(stream)
        return self

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_) -> None:
        self.current.pop()

    class Event:
        def record(self) -> None:
            pass


def fsdp1_hybrid_waits_for_its_replicas() -> None:
    """A held window that is reduced without a backward: the update comes after both reductions, on their streams."""
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, _runtime_utils

    from tests.support.homes import mesh

    model = FullyShardedDataParallel(
        torch.nn.Linear(4, 4), device_id=torch.device("cpu"), use_orig_params=True,
        sharding_strategy=ShardingStrategy.HYBRID_SHARD, device_mesh=mesh((2, 2), ("replica", "shard")),
    )  # fmt: skip
    (engine,) = find([model])
    restore([engine], hold([engine]))
    found = engine.hold()
    model(torch.ones(2, 4)).sum().backward()
    engine.restore(found)
    device, reduced = Device(), []
    model._device_handle, model._post_backward_stream, model._all_reduce_stream = device, Stream("post"), Stream("all")
    plain = _runtime_utils._no_dispatch_record_stream, dist.all_reduce, model._handle.prepare_gradient_for_optim

    def all_reduce(*args, **kwargs):
        reduced.append(device.current_stream().run())
        return plain[1](*args, **kwargs)

    def prepare() -> None:
        assert all(map(device.current_stream().has_seen, reduced)), "a cast there runs before the gradient is whole"
        plain[2]()

    try:
        _runtime_utils._no_dispatch_record_stream, dist.all_reduce = lambda *_: None, all_reduce
        model._handle.prepare_gradient_for_optim = prepare
        engine.reduce()
    finally:
        _runtime_utils._no_dispatch_record_stream, dist.all_reduce, _ = plain
        del model._handle.prepare_gradient_for_optim
    assert [stream for stream, _ in reduced] == ["all"]
    assert device.current_stream().name == "compute" and device.current_stream().has_seen(reduced[0])
