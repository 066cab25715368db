"""What runs on the ranks for test_engine_states.py: windows that are saved in their middle, and go on elsewhere."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import (
    CPUOffloadPolicy, FullyShardedDataParallel, MixedPrecision, MixedPrecisionPolicy, ShardingStrategy, fully_shard,
)  # fmt: skip
from torch.distributed.tensor import Shard
from torch.nn.parallel import DistributedDataParallel as DDP

import gradsync
from gradsync.engines import find
from tests.resume.runs import through_a_file
from tests.engines.scenarios import DECAY, LR, data, mean_loss, reference, same
from tests.support.homes import Home, home_of, mesh, net

NUM = 5  # micro-batches: a window of 3, and a tail of 2


class Run:
    """A model on its engine with the parameters of `old`, and what they were after each update."""

    def __init__(self, home: Home, sync: str | None = None, old: Run | None = None, forward=None) -> None:
        self.home, self.states = home, []
        model = home.model
        if old is not None:
            with torch.no_grad():
                for p, q in zip(model.parameters(), old.home.model.parameters()):
                    p.copy_(q)
        self.optimizer = torch.optim.SGD(model.parameters(), lr=LR, weight_decay=DECAY, foreach=home.foreach)
        forward = forward or (lambda model, rank, index: model(data(rank, index)))
        options = {"sync": sync} if sync else home.options

        @gradsync.accumulating(3, model=model, optimizer=self.optimizer, **options)
        def step(index):
            return mean_loss(forward(model, home.rank, index))

        self.step = step
        self.optimizer.register_step_post_hook(lambda *_: self.states.append(self.home.full()))

    def go(self, start: int, end: int, how: str = "calls") -> None:
        for index in self.step.over(range(start, end)) if how == "over" else range(start, end):
            self.step(index)
        if how == "flush":
            self.step.flush()

    def taken(self) -> dict:
        """Its state, through a file; the run is over."""
        state = self.step.state_dict()
        self.step.reset()
        return through_a_file(state)

    @property
    def gradients(self) -> dict:
        return self.step.state_dict()["windows"][0]["open"]["gradients"]


def resumed_anywhere(make, how: str, sync: str | None = None, forward=None) -> list:
    """Saved after any micro-batch and gone on with in fresh objects, it ends to the bit as if nothing had been.

    Returns what the parameters were after each update of the run that nothing interrupted.
    """
    whole = Run(make(), sync, forward=forward)
    whole.go(0, NUM, how)
    for stop in range(NUM):
        run = Run(make(), sync, forward=forward)
        run.go(0, stop)
        state = run.taken()
        again = Run(make(), sync, old=run, forward=forward)
        again.step.load_state_dict(state)
        assert again.step.progress.micro_steps == stop
        again.go(stop, NUM, how)
        try:
            same(run.states + again.states, whole.states, tolerance=0.0)
        except AssertionError as error:
            raise AssertionError(f"resumed after {stop}: {error}") from error
    return whole.states


def updates(bare: nn.Module, loss, num_ranks: int, windows=(range(3), range(3, NUM))) -> list:
    """The parameters of a bare module after each update, where each window is one big batch."""
    optimizer = torch.optim.SGD(bare.parameters(), lr=LR, weight_decay=DECAY)
    states = []
    for window in windows:
        losses = [loss(rank, index) for rank in range(num_ranks) for index in window]
        (sum(losses) / len(losses)).backward()
        optimizer.step()
        optimizer.zero_grad()
        states.append({name: p.detach().clone() for name, p in bare.named_parameters()})
    return states


# -- every engine --------------------------------------------------------------------------------------------------


def of_engine(engine: str, how: str, sync: str | None = None) -> None:
    states = resumed_anywhere(lambda: home_of(engine), how, sync)
    same(states, reference(home_of(engine), [range(3), range(3, NUM)]))


def used_only_early(engine: str, sync: str | None = None) -> None:
    """The second block not on the boundary, nor after a state that is saved before it; nothing moves what nobody uses."""

    def forward(model, rank, index):
        return model(data(rank, index), only_first=index % 3 > 0)

    states = resumed_anywhere(lambda: home_of(engine, unused=not engine.startswith("fsdp1")), "flush", sync, forward)

    def weigh(model, items):
        return sum(mean_loss(forward(model, *item)) for item in items) / len(items)

    home = home_of(engine, unused=not engine.startswith("fsdp1"))
    same(states, reference(home, [range(3), range(3, NUM)], weigh))


def plain(value) -> bool:
    """Numbers, strings, lists, dicts, and tensors that are nothing more."""
    if isinstance(value, dict):
        return all(isinstance(key, str) and plain(one) for key, one in value.items())
    if isinstance(value, list):
        return all(map(plain, value))
    if isinstance(value, torch.Tensor):
        return type(value) is torch.Tensor and not value.requires_grad
    return value is None or type(value) in {int, float, bool, str}


def whole_by_name(engine: str) -> None:
    """What a state holds is what this rank's micro-batches give to a bare model, each by its name there.

    Without `use_orig_params` FSDP1 has no parameters but the flat ones, by whose names it is then.
    """
    home = home_of(engine)
    run = Run(home, "window")
    run.go(0, 2)
    bare = net()
    sum(mean_loss(bare(data(home.rank, index))) / 3 for index in range(2)).backward()
    expected = {name: p.grad for name, p in bare.named_parameters()}
    if any("_flat_param" in name for name, _ in home.model.named_parameters()):
        parts = {
            "_flat_param": [bare.scale],
            "first._flat_param": bare.first.parameters(),
            "second._flat_param": bare.second.parameters(),
        }
        expected = {name: torch.cat([p.grad.flatten() for p in part]) for name, part in parts.items()}
    assert plain(run.step.state_dict())
    same([run.gradients], [expected], 1e-14)
    state = run.taken()
    run.step.load_state_dict(state)  # into what is alive
    assert run.step.progress.index == 2
    same([run.gradients], [state["windows"][0]["open"]["gradients"]], 0.0)
    again = Run(home_of(engine), "window")
    again.step.load_state_dict(state)
    for one in (run, again):
        one.go(2, 3)
    same(run.states, again.states, 0.0)
    same(run.states, reference(home, [range(3)]))


def asked_on_one_rank(engine: str) -> None:
    home = home_of(engine)
    run = Run(home)
    run.go(0, 3)
    before = run.step.state_dict()["windows"][0]["parameters"]
    for index in (3, 4):
        with torch.no_grad():
            home.model(data(home.rank, index))
        if dist.is_initialized() and dist.get_rank() == 0:
            state = run.step.state_dict()["windows"][0]
            assert state["parameters"] == before
            assert state["index"] == index - 3
        run.go(index, index + 1)
    run.go(5, 6)
    flat = any("_flat_param" in name for name in before)
    assert flat or set(before) == {name for name, _ in net().named_parameters()}
    same(run.states, reference(home, [range(3), range(3, 6)]))


def names_in_wrappers() -> None:
    def fsdp1(model):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)

    def wrapped(model):
        model.first = checkpoint_wrapper(model.first)
        model.second.up = torch.compile(model.second.up, backend="eager")
        return model

    def gradients(wrap):
        run = Run(Home(wrap(net()), dist.get_rank(), 2))
        run.go(0, 2)
        return run.taken()["windows"][0]["open"]["gradients"]

    expected = gradients(lambda model: model)
    assert set(expected) == {name for name, _ in net().named_parameters()}
    for wrap in (lambda model: model, DDP, fully_shard, fsdp1, lambda model: torch.compile(model, backend="eager")):
        same([gradients(lambda model, wrap=wrap: wrap(wrapped(model)))], [expected])


def reduced_without_a_forward(engine: str) -> None:
    """What an engine is given to hold can be synchronised at once, by a model that has never run."""
    run, other = Run(home_of(engine)), home_of(engine)
    run.go(0, 2)
    (mine,), (its,) = find([run.home.model]), find([other.model])
    twin = dict(zip(mine.parameters, its.parameters))
    its.load_held({twin[p]: gradient.clone() for p, gradient in mine.held_gradients().items()})
    run.step.reset()
    assert its.num_held()
    gradsync.sync_gradients(other.model)
    for p in other.model.parameters():
        if p.grad is not None:
            p.grad.mul_(3 / 2)
    torch.optim.SGD(other.model.parameters(), lr=LR, weight_decay=DECAY).step()
    same([other.full()], reference(other, [range(2)]))


# -- in parts ------------------------------------------------------------------------------------------------------


def parts_of_an_hsdp_mesh() -> None:
    """Under sync="shard" a state holds this rank's piece of each sum over its shard group, one dimension more."""
    home = home_of("hsdp_shard")
    run = Run(home)
    run.go(0, 2)
    assert plain(run.step.state_dict())
    bare = net()
    place = mesh((2, 2), ("replicas", "shards"))
    others = [rank for rank in range(4) if rank // 2 == home.rank // 2]
    sum(mean_loss(bare(data(rank, index))) / 3 for rank in others for index in range(2)).backward()
    for name, p in bare.named_parameters():
        piece = run.gradients[name]
        mine = p.grad.chunk(2)[place.get_local_rank("shards")]
        assert piece.shape == (1, *mine.shape), name
        ratio = (piece[0] / mine)[mine != 0]  # torch divides by something before it adds up, and by the rest after
        torch.testing.assert_close(ratio, ratio[:1].expand_as(ratio), rtol=1e-10, atol=0)
    run.step.reset()


def other_shards() -> None:
    """A piece that was saved on another mesh is refused, whatever the number of ranks."""
    run = Run(home_of("hsdp_shard"))
    run.go(0, 1)
    state = run.taken()
    model = net()
    for one in (model.first, model.second, model):
        fully_shard(one, mesh=mesh((1, 4), ("replicas", "shards")))
    other = Run(Home(model, dist.get_rank(), 4, {"sync": "shard"}))
    other.step.load_state_dict(state)
    with pytest.raises(gradsync.GradSyncError, match=r"shape \[2\] where this rank's shard is of shape \[1\]. Use the same mesh"):
        other.step(1)


class OnlyIf(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(5, dtype=torch.float64))

    def forward(self, y, use):
        return y * self.weight if use else y


class Choosy(nn.Module):
    """Parameters that some ranks use in some micro-batches, that give a gradient of zeros, and that nobody uses."""

    NAMES = ("last_rank_zeros", "nobody", "always", "never_trained")

    def __init__(self) -> None:
        super().__init__()
        for name in self.NAMES:
            setattr(self, name, nn.Parameter(torch.ones(5, dtype=torch.float64), requires_grad=name != "never_trained"))
        self.first_rank_first_time = OnlyIf()

    def forward(self, x, rank, index):
        y = x.sum() * self.always * self.never_trained
        y = self.first_rank_first_time(y, rank == 0 and index == 0)
        if rank == 3 and index == 0:
            y = y + self.last_rank_zeros * 0
        return y


def who_used_what() -> None:
    """Is not forgotten: what no rank used has no gradient, and what one used and gave zeros has one, as weight decay shows."""

    def make():
        model = Choosy()
        for one in (model.first_rank_first_time, model):
            fully_shard(one, mesh=mesh((2, 2), ("replicas", "shards")))
        return Home(model, dist.get_rank(), 4, {"sync": "shard"})

    def forward(model, rank, index):
        return model(data(rank, index), rank, index)

    states = resumed_anywhere(make, "flush", forward=forward)
    bare = Choosy()
    same(states, updates(bare, lambda rank, index: mean_loss(bare(data(rank, index), rank, index)), 4))
    assert torch.equal(states[-1]["nobody"], torch.ones(5, dtype=torch.float64))
    assert states[0]["last_rank_zeros"].max() < 1
    run = Run(make(), forward=forward)
    run.go(0, 1)
    state = run.taken()
    run.step.load_state_dict(state)
    run.step.flush()  # with what was loaded alone: every rank reduces what any of them has used
    bare = Choosy()
    same(run.states, updates(bare, lambda rank, index: mean_loss(forward(bare, rank, index)), 4, [range(1)]))


def another_sync(engine: str, before: str, after: str) -> None:
    """What is saved under one is gone on with under another; it cannot be saved again until the boundary."""
    unused = engine.startswith("hsdp")

    def forward(model, rank, index):  # the second block only before the state is saved
        return model(data(rank, index), only_first=index % 3 > 0)

    def weigh(model, items):
        return sum(mean_loss(forward(model, *item)) for item in items) / len(items)

    run = Run(home_of(engine, unused=unused), before, forward=forward)
    run.go(0, 4)
    state = run.taken()
    again = Run(home_of(engine, unused=unused), after, run, forward)
    again.step.load_state_dict(state)
    again.go(4, 6)
    same(run.states + again.states, reference(run.home, [range(3), range(3, 6)], weigh))
    odd = Run(home_of(engine, unused=unused), after)
    odd.step.load_state_dict(state)
    odd.go(4, 5)
    if before == "window" or (before, after) == ("shard", "each"):  # all that was held has come into the one form
        odd.step.state_dict()
    else:
        with pytest.raises(gradsync.GradSyncError, match="so that there are two. Save at a boundary, where progress.index is 0"):
            odd.step.state_dict()
    odd.step.reset()
    odd.go(0, 3)


# -- shapes, types, places -----------------------------------------------------------------------------------------


class Odd(nn.Module):
    """Sizes that nothing divides, a parameter of one element, one that is shared, and one that is frozen."""

    def __init__(self, frozen: bool = False, tied: bool = True) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.one, self.two, self.three = nn.Linear(4, 7), nn.Linear(7, 4), nn.Linear(4, 4)
        self.single = nn.Linear(4, 1)
        self.tied = nn.Linear(4, 7, bias=False)
        if tied:
            self.tied.weight = self.one.weight
        self.two.weight.requires_grad_(not frozen)

    def forward(self, x):
        y = self.three(self.two(torch.tanh(self.one(x))))
        return self.single(y) + self.tied(y).sum()


def _fsdp1(dtype=torch.float64, shape=None, odd=None, **options):
    def make():
        if shape:
            options["device_mesh"] = mesh(shape, ("replicas", "shards"))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = FullyShardedDataParallel(Odd(**odd or {}).to(dtype), device_id=torch.device("cpu"), **options)
        return Home(model, dist.get_rank(), dist.get_world_size())

    return make


def _fsdp2(dtype=torch.float64, shape=None, odd=None, **options):
    def make():
        model = Odd(**odd or {}).to(dtype)
        where = mesh(shape, ("replicas", "shards")) if shape else mesh((dist.get_world_size(),), ("data",))
        fully_shard(model, mesh=where, **options)
        return Home(model, dist.get_rank(), dist.get_world_size(), {"sync": "shard"} if shape else {})

    return make


FROZEN = {"frozen": True}
LOW = {"mixed_precision": MixedPrecision(torch.bfloat16, torch.float32), "dtype": torch.float32}
LOW2 = {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32), "dtype": torch.float32}
OFFLOADED = {"offload_policy": CPUOffloadPolicy(pin_memory=False)}
# name: (ranks, how the model gets there, what it is like)
KINDS = {
    "fsdp1": (2, _fsdp1, {}),
    "fsdp1 orig": (2, _fsdp1, {"use_orig_params": True}),
    "fsdp1 orig, frozen": (2, _fsdp1, {"use_orig_params": True, "odd": FROZEN}),
    "fsdp1 bf16": (2, _fsdp1, LOW),
    "fsdp1 bf16 orig": (2, _fsdp1, {"use_orig_params": True, **LOW}),
    # where parameters are shared, torch 2.13 alone raises in the second micro-batch of a `no_sync`
    "fsdp1 bf16 orig, not sharded": (
        2, _fsdp1, {"use_orig_params": True, "sharding_strategy": ShardingStrategy.NO_SHARD, "odd": {"tied": False}, **LOW}
    ),
    "fsdp1 hybrid": (4, _fsdp1, {"sharding_strategy": ShardingStrategy.HYBRID_SHARD, "shape": (2, 2)}),
    "fsdp1 hybrid orig": (
        4, _fsdp1, {"sharding_strategy": ShardingStrategy.HYBRID_SHARD, "shape": (2, 2), "use_orig_params": True}
    ),
    "fsdp2": (2, _fsdp2, {}),
    "fsdp2, frozen": (2, _fsdp2, {"odd": FROZEN}),
    "fsdp2 bf16": (2, _fsdp2, LOW2),
    "fsdp2 offloaded": (2, _fsdp2, OFFLOADED),
    "hsdp": (4, _fsdp2, {"shape": (2, 2)}),
    "hsdp, frozen": (4, _fsdp2, {"shape": (2, 2), "odd": FROZEN}),
    "hsdp bf16": (4, _fsdp2, {"shape": (2, 2), **LOW2}),
    "hsdp offloaded": (4, _fsdp2, {"shape": (2, 2), **OFFLOADED}),
    "hsdp of one shard": (4, _fsdp2, {"shape": (4, 1)}),
    "hsdp of one replica": (4, _fsdp2, {"shape": (1, 4)}),
    "hsdp by columns": (
        4, _fsdp2, {"shape": (2, 2), "shard_placement_fn": lambda p: Shard(p.dim() == 2 and p.shape[1] % 2 == 0)}
    ),
}  # fmt: skip


def of_kind(kind: str, sync: str | None = None) -> None:
    _, make, options = KINDS[kind]
    dtype = options.get("dtype", torch.float64)
    states = resumed_anywhere(make(**options), "flush", sync, lambda model, rank, index: model(data(rank, index).to(dtype)))
    bare, size = Odd(**options.get("odd") or {}).double(), dist.get_world_size()
    expected = updates(bare, lambda rank, index: mean_loss(bare(data(rank, index))), size)
    states = [{name: p.double() for name, p in state.items()} for state in states]
    same(states, expected, 1e-10 if dtype is torch.float64 else 0.2)  # bf16 has 8 bits
