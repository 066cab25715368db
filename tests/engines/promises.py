"""What runs on the ranks for test_engines.py: promises that are no row of the table."""

from __future__ import annotations

import contextlib
import re

import pytest
import torch
import torch.distributed as dist
from torch import nn

import gradsync
from gradsync.engines import Engine, attach, find, register
from gradsync.functional._gradients import all_finite, clip, discard, norm, normalise
from gradsync.functional._leaf_hooks import weightless
from tests.engines.scenarios import DECAY, EPOCHS, LR, Run, Uneven, data, mean_loss, reference, same, windows_of
from tests.engines.counts import Wire
from tests.support.homes import Block, Home, home_of, mesh, net, tensor_parallel


def held(home: Home) -> list[str]:
    """Where FSDP2 still keeps gradients."""
    found = [name for name, p in home.model.named_parameters() if p.grad is not None]
    for engine in find([home.model]):
        for group in getattr(engine, "_groups", ()):
            if group._partial_reduce_output is not None:
                found.append("partial")
            for p in group.fsdp_params:
                if p.unsharded_accumulated_grad is not None or (
                    hasattr(p, "_unsharded_param") and p._unsharded_param.grad is not None
                ):
                    found.append("held")
    return found


# -- switches ------------------------------------------------------------------------------------------------------


def flags(home: Home) -> list[tuple]:
    names = ("reduce_grads", "all_reduce_grads", "reshard_after_backward", "reduce_scatter_unused_params")
    return [
        tuple(getattr(group, name) for name in names) for engine in find([home.model]) for group in engine._groups
    ]


def switches_are_put_back(engine: str) -> None:
    home = home_of(engine)
    home.model.second.set_requires_gradient_sync(False)  # whatever their user had set
    home.model.first.set_reshard_after_backward(False)
    before = flags(home)
    run = Run(home)
    for index in range(4):
        run(index)
        assert flags(home) == before
    run.explode = 4
    with pytest.raises(KeyError):
        run(4)
    assert flags(home) == before
    with gradsync.no_sync(home.model):
        held_back = flags(home)
        assert not any(reduce for reduce, *_ in held_back)
        with contextlib.suppress(KeyError), gradsync.no_sync(home.model.second, home.model):
            raise KeyError
        assert flags(home) == held_back
    assert flags(home) == before
    micro = gradsync.sync_every(home.model, 2)
    next(micro)
    micro.close()
    assert flags(home) == before


def discarding_leaves_nothing(engine: str) -> None:
    home = home_of(engine)
    run = Run(home)
    for index in (0, 1):
        run(index)
    assert held(home)
    home.model.zero_grad()
    run.step.reset()
    assert not held(home)
    for index in (0, 1):
        run(index)
    run.explode = 2
    with pytest.raises(KeyError):
        run(2)
    assert not held(home)
    dropping = Run(home, tail="drop")
    dropping.over(2)
    assert not held(home)


def idle(home: Home) -> bool:
    """Whether FSDP is between two iterations."""
    for engine in find([home.model]):
        for state in getattr(engine, "_states", ()):
            if state._training_state.name != "IDLE" or state._state_ctx.post_backward_final_callback_queued:
                return False
        for module in getattr(engine, "_instances", ()):
            if module.training_state.name != "IDLE" or getattr(module, "_post_backward_callback_queued", False):
                return False
    return True


def after_an_exception(engine: str) -> None:
    """Wherever it struck, the next window is sent as the last one was."""
    home = home_of(engine)
    run = Run(home)
    second = [module for module in home.model.modules() if isinstance(module, Block)][1]

    def window():
        wire = Wire()
        for index in range(3):
            run(index)
        return wire.look()

    window()
    usual = window()
    for where in ("forward", "backward"):
        for at in (1, 2):
            for index in range(at + 1):
                second.fails = where if index == at else ""
                with pytest.raises(ArithmeticError) if index == at else contextlib.nullcontext():
                    run(index)
            second.fails = ""
            assert idle(home), (where, at)
            assert window() == usual, (where, at)


def unfreezing(engine: str) -> None:
    home = home_of(engine)
    second = [p for name, p in home.model.named_parameters() if "second" in name]
    for p in second:
        p.requires_grad_(requires_grad=False)
    run = Run(home)
    for index in range(3):
        run(index)
    for p in second:
        p.requires_grad_(requires_grad=True)
    for index in range(3, 6):
        run(index)

    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, weight_decay=DECAY)
    expected = []
    for window in (range(3), range(3, 6)):
        model.second.requires_grad_(requires_grad=bool(expected))
        items = [(rank, index) for rank in range(home.size) for index in window]
        (sum(mean_loss(model(data(*item))) for item in items) / len(items)).backward()
        optimizer.step()
        optimizer.zero_grad()
        expected.append({name: p.detach().clone() for name, p in model.named_parameters()})
    same(run.states, expected)


def held_gradients_can_be_taken_and_put_back(engine: str) -> None:
    """Into a model that has run no forward yet, too; a flush may follow at once."""
    home, fresh = home_of(engine), home_of(engine)
    run = Run(home)
    for index in range(2):
        run(index)
    (engine_of_home,), (engine_of_fresh,) = find([home.model]), find([fresh.model])
    held = [gradient.clone() for gradient in engine_of_home.held_gradients().values()]
    assert len(held) == len(list(fresh.model.parameters()))
    assert all(h.shape == p.shape for h, p in zip(held, fresh.model.parameters()))
    optimizer = torch.optim.SGD(fresh.model.parameters(), lr=LR, weight_decay=DECAY)
    engine_of_fresh.load_held(dict(zip(engine_of_fresh.parameters, held)))
    gradsync.sync_gradients(fresh.model)
    for p in fresh.model.parameters():
        p.grad.mul_(3 / 2)
    optimizer.step()
    same([fresh.full()], reference(fresh, [range(2)]))
    engine_of_home.discard()
    engine_of_home.load_held(dict(zip(engine_of_home.parameters, held)))
    run(2)
    same(run.states, reference(home, [range(3)]))


# -- precision and memory ------------------------------------------------------------------------------------------


class Partly(nn.Module):
    """Two layers; the second runs only when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)
        self.both = False

    def forward(self, x):
        x = self.one(x)
        return self.two(x) if self.both else x


def mixed_precision_with_a_module_that_never_ran() -> None:
    """torch 2.13 alone raises AttributeError as such a held backward ends. Held gradients add up in float32."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    model = Partly()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in (model.one, model.two):
        fully_shard(layer, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)

    @gradsync.accumulating(16)
    def step(model, optimizer, index):
        return model(data(dist.get_rank(), index).float()).float().square().mean()

    for index in range(31):
        model.both = index >= 24
        step(model, optimizer, index)
        if index == 20:
            (engine,) = find([model])
            assert {p.unsharded_accumulated_grad.dtype for g in engine._groups[:1] for p in g.fsdp_params} <= {torch.float32}
    step.flush()


def held_gradients_add_up_in_float32() -> None:
    """As the reduction is: the error of 64 micro-batches in bfloat16 stays that of one."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    def run(steps):
        torch.manual_seed(0)
        model = nn.Linear(64, 8)
        fully_shard(model, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)

        @gradsync.accumulating(steps)
        def step(model, optimizer):
            return model(torch.linspace(0.1, 1.7, 64).repeat(4, 1)).float().square().mean()

        before = model.weight.full_tensor().clone()
        for _ in range(steps):
            step(model, optimizer)
        return before - model.weight.full_tensor()

    once, often = run(1), run(64)
    assert ((often - once).norm() / once.norm()).item() < 1e-5


def cpu_offload() -> None:
    from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

    model = net()
    for block in (model.first, model.second, model):
        fully_shard(block, offload_policy=CPUOffloadPolicy(pin_memory=False))
    home = Home(model, dist.get_rank(), dist.get_world_size())
    run = Run(home, clip_norm=1e9)
    run.over(5)
    same(run.states, reference(home, [range(3), range(3, 5)]))


# -- participants --------------------------------------------------------------------------------------------------


def bystanders(engine: str) -> None:
    """A GAN whose halves are both on the engine: each half's window is as if the other half were frozen."""
    maker, critic = home_of(engine), home_of(engine)
    torch.manual_seed(0)
    optimizers = [torch.optim.SGD(one.model.parameters(), lr=LR, foreach=False) for one in (maker, critic)]

    @gradsync.accumulating(3)
    def train_maker(maker, critic, optimizer, index):
        return mean_loss(critic(maker(data(rank, index))))

    @gradsync.accumulating(2)
    def train_critic(critic, maker, optimizer, index):
        with torch.no_grad():
            fake = maker(data(rank, index))
        return mean_loss(critic(fake)) + mean_loss(critic(data(rank, index + 50)))

    rank = maker.rank
    came = []
    for index in range(6):
        train_maker(maker.model, critic.model, optimizers[0], index)
        train_critic(critic.model, maker.model, optimizers[1], index)
        came += [maker.full(), critic.full()]

    halves = [net(), net()]
    plain = [torch.optim.SGD(one.parameters(), lr=LR) for one in halves]
    expected, losses = [], [[], []]
    for index in range(6):
        for who, size in ((0, 3), (1, 2)):
            for other in range(maker.size):
                x = data(other, index)
                if who == 0:
                    losses[0].append(torch.autograd.grad(mean_loss(halves[1](halves[0](x))), list(halves[0].parameters())))
                else:
                    loss = mean_loss(halves[1](halves[0](x).detach())) + mean_loss(halves[1](data(other, index + 50)))
                    losses[1].append(torch.autograd.grad(loss, list(halves[1].parameters())))
            if index % size == size - 1:
                for p, *gradients in zip(halves[who].parameters(), *losses[who]):
                    p.grad = sum(gradients) / len(gradients)
                plain[who].step()
                plain[who].zero_grad()
                losses[who] = []
        expected += [{name: p.detach().clone() for name, p in half.named_parameters()} for half in halves]
    same(came, expected)


def a_sharded_teacher_of_ranks_of_unequal_length(engine: str) -> None:
    """Its forward waits for all ranks, even where that of the model which is trained does not."""
    home, teacher, plain = home_of(engine), home_of("fsdp2").model, net()
    other = data(0, 99)  # the teacher has the weights of the model: on other data it says something else
    run = Uneven(home)

    @gradsync.accumulating(3)
    def step(model, teacher, optimizer, index):
        return mean_loss(model(data(home.rank, index)) * teacher(other))

    for lengths in EPOCHS[home.size]:
        for index in step.over(range(lengths[home.rank])):
            step(home.model, teacher, run.optimizer, index)

    def weigh(model, items):
        return sum(mean_loss(model(data(*item)) * plain(other).detach()) for item in items) / len(items)

    same(run.states, reference(home, windows_of(EPOCHS[home.size]), weigh))


def a_forward_before_the_first_call(engine: str) -> None:
    """An evaluation leaves the root's parameters gathered; the optimizer's are still found."""
    home = home_of(engine)
    run = Run(home)
    with torch.no_grad():
        home.model(data(0, 0))
    run.over(5)
    with torch.no_grad():
        home.model(data(0, 0))
    same(run.states, reference(home, [range(3), range(3, 5)]))


def a_replay_weighs_nothing(engine: str) -> None:
    """Zeros in place of its gradients, as they arrive, whatever the loss is."""
    home = home_of(engine)
    engines = attach([home.model])
    (mean_loss(home.model(data(home.rank, 0)))).backward()
    discard(p for one in engines for p in one.parameters)
    leaves = [leaf for one in engines for leaf in one.leaves]
    hooks = weightless(leaves)
    (home.model(data(home.rank, 0)) * float("nan")).sum().backward()
    hooks.remove()
    gradients = [p.grad for one in engines for p in one.parameters if p.grad is not None]
    assert gradients
    assert not any((g.to_local() if hasattr(g, "to_local") else g).any() for g in gradients)


def gradients_of_somebody_else(engine: str) -> None:
    """A backward of the user's own, before a window or in its body, is found also where `p.grad` does not show it."""
    home = home_of(engine)
    run = Run(home, loss=lambda y, index: (y.sum().backward(retain_graph=True), mean_loss(y))[1])
    with pytest.raises(gradsync.GradSyncError, match="something ran backward"):
        run(0)
    run = Run(home)
    with gradsync.no_sync(home.model):
        mean_loss(home.model(data(home.rank, 0))).backward()
    with pytest.raises(gradsync.GradSyncError, match=r"begin without gradients.*Call .*optimizer.zero_grad\(\)"):
        run(0)


# -- errors --------------------------------------------------------------------------------------------------------


def a_plain_scaler_on_fsdp1() -> None:
    home = home_of("fsdp1_full")
    run = Run(home, scaler=torch.amp.GradScaler("cpu"), steps=1)
    with pytest.raises(gradsync.GradSyncError, match="Use torch.distributed.fsdp.sharded_grad_scaler.ShardedGradScaler"):
        run(0)


def another_divide_factor() -> None:
    home = home_of("fsdp2")
    home.model.first.set_gradient_divide_factor(1.0)
    with pytest.raises(gradsync.GradSyncError, match="set_gradient_divide_factor was called"):
        Run(home)(0)


def tensor_parallel_without_data_parallel() -> None:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    part = mesh((2, 2), ("data", "tensor"))["tensor"]
    model = net()
    parallelize_module(model.first, part, plan)
    with pytest.raises(gradsync.GradSyncError, match="Call fully_shard or replicate on the model"):
        Run(Home(model))(0)


def tensor_parallel_ranks_of_unequal_length(dimensions: dict, lengths: list[int], said: list[str]) -> None:
    """They would wait for each other in a forward that one of them alone runs."""
    home = tensor_parallel(net(), **dimensions)
    rank = dist.get_rank()
    text = f"numbers of items, but {said[rank // 2]}. Ranks of one tensor-parallel group run one forward: give them the same data."
    with pytest.raises(gradsync.GradSyncError, match=re.escape(text)):
        Run(home, named=True).over(lengths[rank])
    with pytest.raises(gradsync.GradSyncError, match=re.escape(text)):
        for micro, index in gradsync.sync_every(home.model, 3, range(lengths[rank])):
            micro.backward(mean_loss(home.model(data(home.rank, index))))
    run = Run(home)
    run.over(3)
    same(run.states, reference(home, [range(3)]))
    if not all(lengths):
        return
    # Where they are not known: as soon as they differ.
    text = "must come to the same micro-batches, but those of data-parallel rank 1 do not"
    with pytest.raises(gradsync.GradSyncError, match=text):
        Run(tensor_parallel(net(), **dimensions)).over(lengths[rank], known=False)
    home = tensor_parallel(net(), **dimensions)
    with pytest.raises(gradsync.GradSyncError, match=text):
        for micro, index in gradsync.sync_every(home.model, 3, iter(range(lengths[rank]))):
            micro.backward(mean_loss(home.model(data(home.rank, index))))


# -- a user's engine -----------------------------------------------------------------------------------------------


class Ring(nn.Module):
    """Somebody's wrapper: averages each gradient as it arrives, unless told to wait."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module, self.waits = module, False
        for parameter in module.parameters():
            parameter.register_post_accumulate_grad_hook(self._average)

    def _average(self, parameter: nn.Parameter) -> None:
        if not self.waits:
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()

    def forward(self, *args, **kwargs):
        return self.module(*args, **kwargs)

    def no_sync(self):
        raise NotImplementedError


class RingEngine(Engine):
    def __init__(self, ring: Ring) -> None:
        super().__init__(dist.group.WORLD, list(ring.parameters()))
        self._ring = ring

    def hold(self) -> bool:
        found, self._ring.waits = self._ring.waits, True
        return found

    def restore(self, found: bool) -> None:
        self._ring.waits = found

    def arm(self, loss) -> None:
        self._ring.waits = False

    def reduce(self, table=()):
        for parameter in self.parameters:
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad)
                parameter.grad /= self.group.size()


def a_users_engine() -> None:
    home = Home(Ring(net()), dist.get_rank(), dist.get_world_size())
    with pytest.raises(gradsync.GradSyncError, match=r"does not know tests\.engines\.promises\.Ring.*register\(Ring, "):
        Run(home)(0)
    register(Ring, RingEngine)
    run = Run(home)
    run.over(5)
    for index in range(2):
        run(index)
    run.step.flush()
    run.note(2)
    same(run.states, reference(home, [range(3), range(3, 5), range(2)]))


# -- beyond data parallel ------------------------------------------------------------------------------------------


def gradients_of_several_meshes() -> None:
    """The norm of all, DTensors of two meshes with plain ones beside them, is that of the whole gradients."""
    home = home_of("fsdp2_tp")
    beside = nn.Parameter(torch.ones(3, dtype=torch.float64))
    engines = attach([home.model])
    with gradsync.no_sync(home.model):
        mean_loss(home.model(data(home.rank, 0))).backward()
    gradsync.sync_gradients(home.model)
    assert engines[0].group.size() == 2
    parameters = [*home.model.parameters(), beside]
    beside.grad = torch.full((3,), 0.25, dtype=torch.float64)
    assert len({getattr(p.grad, "device_mesh", None) for p in parameters}) == 3

    def whole():
        full = [p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad for p in parameters]
        return torch.cat([gradient.flatten() for gradient in full])

    before = whole()
    torch.testing.assert_close(norm(parameters), before.norm(), rtol=1e-12, atol=0)
    normalise(parameters, 0.5)
    torch.testing.assert_close(whole(), before * 0.5)
    total = clip(parameters, 0.01)
    torch.testing.assert_close(total, before.norm() * 0.5, rtol=1e-12, atol=0)
    torch.testing.assert_close(whole().norm(), torch.tensor(0.01, dtype=torch.float64), rtol=1e-3, atol=0)
    assert all_finite(parameters)
    if dist.get_rank() == 3:
        home.model.first.up.weight.grad.to_local()[0] = float("nan")
    assert not all_finite(parameters)
    discard(parameters)
    assert all(p.grad is None for p in parameters)


def partial_reductions_of_the_users_own() -> None:
    """`sync_gradients` after micro-batches that torch's own switch has reduce-scattered only."""
    home = home_of("hsdp_window")
    optimizer = torch.optim.SGD(home.model.parameters(), lr=LR, weight_decay=DECAY)
    home.model.set_requires_all_reduce(False)
    for index in range(3):
        (mean_loss(home.model(data(home.rank, index))) / 3).backward()
    gradsync.sync_gradients(home.model)
    optimizer.step()
    same([home.full()], reference(home, [range(3)]))


def a_part_of_a_model() -> None:
    """`sync_gradients` of one block leaves what the others hold."""
    home = home_of("fsdp2")
    with gradsync.no_sync(home.model):
        mean_loss(home.model(data(home.rank, 0))).backward()
    gradsync.sync_gradients(home.model.first)
    synchronised = {name for name, p in home.model.named_parameters() if p.grad is not None}
    assert synchronised == {f"first.{name}" for name, _ in home.model.first.named_parameters()}
    gradsync.sync_gradients(home.model)
    assert all(p.grad is not None for p in home.model.parameters())


def hybrid_on_a_part_of_the_ranks() -> None:
    """HSDP within tensor parallelism: the table of a window is summed over the data-parallel ranks alone."""
    from torch.distributed.fsdp import fully_shard

    three = mesh((2, 1, 2), ("outer", "inner", "tensor"))
    model = net()
    fully_shard(model, mesh=three["outer", "inner"])
    home = Home(model, three["outer"].get_local_rank(), 2)
    (engine,) = find([model])
    assert dist.get_process_group_ranks(engine.group) == [dist.get_rank() % 2, dist.get_rank() % 2 + 2]
    run = Run(home)
    run.over(5)
    same(run.states, reference(home, [range(3), range(3, 5)]))


# -- torch.compile -------------------------------------------------------------------------------------------------


def compiled(engine: str) -> None:
    """No graph is made after the second window."""
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    home = home_of(engine)
    home.inside = home.net
    home.model = torch.compile(home.model, backend="eager")
    run = Run(home)
    for index in range(6):
        run(index)
    before = counters["stats"]["unique_graphs"], counters["frames"]["total"]
    assert before[0] > 0
    for index in range(6, 15):
        run(index)
    assert (counters["stats"]["unique_graphs"], counters["frames"]["total"]) == before
    same(run.states, reference(home, [range(start, start + 3) for start in range(0, 15, 3)]))
