"""The loops that `test_audit.py` audits: each runs on real ranks and is compared with the collectives it really made.

`python -m tests.audit.loops RANK RANKS DIRECTORY` runs all loops for that number of ranks and writes what came out, as JSON.
The truth comes from torch's flight recorder, which the audit does not use.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import gradsync
from gradsync._audit import audit, find_engines, watch
from gradsync._errors import GradSyncError
from tests.support.ranks import GROUP_TIMEOUT

STEPS, WINDOWS = 4, 3
NUMEL = 66  # of `mlp()`
LOOPS: dict[int, dict[str, Any]] = {2: {}, 4: {}}


def loop(ranks=2):
    def register(function):
        LOOPS[ranks][function.__name__] = function
        return function

    return register


def mlp():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 3))


def make(model=None, **kwargs):
    ddp = DistributedDataParallel(model or mlp(), **kwargs)
    return ddp, torch.optim.SGD(ddp.parameters(), lr=0.1)


def batch():
    return torch.randn(2, 5) + dist.get_rank()


def step(optimizer, **kwargs):
    optimizer.step()
    optimizer.zero_grad(**kwargs)


class Recorder:
    """The collectives since the last look."""

    def __init__(self):
        self._seen = -1
        self.since()

    def since(self):
        from torch._C._distributed_c10d import _dump_fr_trace_json

        entries = json.loads(_dump_fr_trace_json()).get("entries", [])  # absent while there are none
        new = [one for one in entries if one["record_id"] > self._seen]
        if new:
            assert new[0]["record_id"] == self._seen + 1 or self._seen == -1, "the flight recorder's ring overflowed"
            self._seen = new[-1]["record_id"]
        found = []
        for one in new:
            numel = sum(torch.Size(sizes).numel() for sizes in one["input_sizes"])
            found.append((one["profiling_name"].removeprefix("gloo:"), numel, "".join(one["input_dtypes"][:1])))
        return found


def outcome(report, **more):
    numbers = {
        name: getattr(report, name)
        for name in ("backwards", "syncs", "updates", "bytes", "wasted", "missed", "discarded", "advice")
    }
    return {**numbers, "text": str(report), **more}


# -- the known bugs, the known bugs of other loops --------------------------------------------------------------------------


@loop()
def never_held():
    model, optimizer = make()
    with audit(model, optimizer) as report:
        for _ in range(WINDOWS):
            for _ in range(STEPS):
                model(batch()).sum().backward()
            step(optimizer)
    return outcome(report)


@loop()
def no_sync_around_backward_alone():
    model, optimizer = make()
    with audit(model, optimizer) as report:
        for _ in range(WINDOWS):
            for i in range(STEPS):
                loss = model(batch()).sum()
                with model.no_sync() if i < STEPS - 1 else nullcontext():
                    loss.backward()
            step(optimizer)
    return outcome(report)


def windows(model, optimizer, synchronising, n=WINDOWS, **kwargs):
    """Windows by hand: `synchronising` says which micro-batches of a window do."""
    with audit(model, optimizer) as report:
        for _ in range(n):
            for i in range(STEPS):
                with nullcontext() if i in synchronising else model.no_sync():
                    model(batch()).sum().backward()
            step(optimizer, **kwargs)
    return report


@loop()
def first_synchronises_too():
    return outcome(windows(*make(), {0, STEPS - 1}))


@loop()
def first_instead_of_last():
    return outcome(windows(*make(), {0}))


@loop()
def flag_flipped_after_forward():
    model, optimizer = make()
    with audit(model, optimizer) as report:
        for _ in range(WINDOWS):
            for i in range(STEPS):
                loss = model(batch()).sum()
                model.require_backward_grad_sync = i == STEPS - 1
                loss.backward()
            step(optimizer)
    return outcome(report)


@loop()
def bypassed():
    model, optimizer = make()
    with audit(model, optimizer) as report:
        for _ in range(WINDOWS):
            for i in range(STEPS):
                with model.no_sync() if i < STEPS - 1 else nullcontext():
                    model.module(batch()).sum().backward()
            step(optimizer)
    return outcome(report)


@loop()
def tail_never_synchronised():
    model, optimizer = make()
    with audit(model, optimizer) as report:
        for i in range(STEPS + 2):
            with model.no_sync() if (i + 1) % STEPS else nullcontext():
                model(batch()).sum().backward()
            if (i + 1) % STEPS == 0:
                step(optimizer)
        step(optimizer)
    return outcome(report)


@loop()
def bare_on_several_ranks():
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with audit(model, optimizer) as report:
        for _ in range(WINDOWS):
            model(batch()).sum().backward()
            step(optimizer)
    return outcome(report)


@loop()
def unfrozen_after_ddp_was_made():
    module = mlp()
    module[0].requires_grad_(False)
    model = DistributedDataParallel(module)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with audit(model, optimizer) as report:
        model(batch()).sum().backward()
        step(optimizer)
        before = (report.missed, report.bytes)
        module[0].requires_grad_(True)
        model(batch()).sum().backward()
        step(optimizer)
    return outcome(report, before=before)


# -- right loops, and what is on the wire beside gradients ---------------------------------------------------------


def right(**kwargs):
    model, optimizer = make(**kwargs)
    return outcome(windows(model, optimizer, {STEPS - 1}))


@loop()
def right_default():
    return right()


@loop()
def right_find_unused():
    return right(find_unused_parameters=True)


@loop()
def right_bucket_views():
    return right(gradient_as_bucket_view=True)


@loop()
def right_small_buckets():
    return right(bucket_cap_mb=1e-5)


@loop()
def right_zeroed_in_place():
    return outcome(windows(*make(gradient_as_bucket_view=True), {STEPS - 1}, set_to_none=False))


@loop()
def right_buffers():
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6, affine=False), nn.Linear(6, 4), nn.Linear(4, 2))
    return right(model=module)  # 36 + 28 + 10 parameters


@loop()
def right_static_graph():
    """The very first micro-batch of all has to synchronise: SNNS, then NNNS."""
    model, optimizer = make(static_graph=True)
    with audit(model, optimizer) as report:
        for window in range(WINDOWS):
            for i in range(STEPS):
                with nullcontext() if i == STEPS - 1 or i + window == 0 else model.no_sync():
                    model(batch()).sum().backward()
            step(optimizer)
    return outcome(report)


@loop()
def static_graph_never_held():
    return outcome(windows(*make(static_graph=True), range(STEPS)))


@loop()
def static_graph_bypassed():
    model, optimizer = make(static_graph=True)
    with audit(model, optimizer) as report:
        for _ in range(WINDOWS):
            model.module(batch()).sum().backward()
            step(optimizer)
    return outcome(report)


@loop()
def static_graph_reduced_by_hand():
    """gradsync reduces a static graph's held gradients bucket by bucket, and counts that itself."""
    model, optimizer = make(static_graph=True)
    windows(model, optimizer, range(STEPS), n=1)
    with audit(model, optimizer) as report:
        for _ in range(WINDOWS):
            for _ in range(STEPS):
                with model.no_sync():
                    model(batch()).sum().backward()
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
            model.__dict__["_gradsync_reductions"] = model.__dict__.get("_gradsync_reductions", 0) + 1
            step(optimizer)
    return outcome(report)


CALLS: list[int] = []


def counting_hook(state, bucket):
    CALLS.append(bucket.index())
    return fp16_compress_hook(state, bucket)


@loop()
def users_communication_hook():
    model, optimizer = make()
    model.register_comm_hook(None, counting_hook)
    CALLS.clear()
    report = windows(model, optimizer, {0, STEPS - 1})
    return outcome(report, calls=len(CALLS))


@loop()
def users_own_collectives():
    """The loss averaged for a log, in forward, between, and inside the backward as SyncBatchNorm does."""

    class Noisy(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            dist.all_reduce(torch.zeros(NUMEL))
            return x

        @staticmethod
        def backward(ctx, grad):
            dist.all_reduce(torch.zeros(NUMEL))
            return grad

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = mlp()

        def forward(self, x):
            return self.inner[2](Noisy.apply(self.inner[:2](x)))

    model, optimizer = make(Model())
    with audit(model, optimizer) as report:
        for _ in range(WINDOWS):
            for i in range(STEPS):
                with model.no_sync() if i < STEPS - 1 else nullcontext():
                    loss = model(batch()).sum()
                    loss.backward()
                dist.all_reduce(loss.detach())
            step(optimizer)
    # Two of the size of a bucket in each micro-batch are the loop's own.
    return outcome(report, own=2 * WINDOWS * STEPS)


@loop()
def late_armed_by_hand():
    """As gradsync does it: the wrapper's forward never runs, and its flag is False throughout."""
    numbers = {}
    for kwargs in ({}, {"gradient_as_bucket_view": True}, {"find_unused_parameters": True}, {"bucket_cap_mb": 1e-5}):
        model, optimizer = make(**kwargs)
        model.require_backward_grad_sync = False
        with audit(model, optimizer) as report:
            for _ in range(WINDOWS):
                for i in range(STEPS):
                    loss = model.module(batch()).sum()
                    if i == STEPS - 1:
                        arm(model, [loss] if kwargs.get("find_unused_parameters") else [])
                    loss.backward()
                step(optimizer)
        numbers[str(kwargs)] = (report.backwards, report.syncs, report.updates, report.wasted, report.missed)
    return outcome(report, numbers=numbers)


def arm(model, outputs=()):
    reducer = model.reducer
    reducer._rebuild_buckets()
    reducer.prepare_for_forward()
    reducer.prepare_for_backward(list(outputs))


@loop()
def synchronised_without_a_backward():
    """What is accumulated is reduced by a zero backward at the leaves, once with zeros and once with nothing at all."""
    model, optimizer = make()
    parameters = list(model.parameters())

    class Nothing(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *parameters):
            return parameters[0].new_zeros(())

        @staticmethod
        def backward(ctx, *_):
            return (None,) * len(parameters)

    seen = []
    with audit(model, optimizer) as report:
        for way in range(3):
            for _ in range(STEPS):
                with model.no_sync():
                    model(batch()).sum().backward()
            if way < 2:
                arm(model)
            if way == 0:
                torch.autograd.backward(parameters, [p.new_zeros(()).expand_as(p) for p in parameters])
            elif way == 1:
                Nothing.apply(*parameters).backward()
            seen.append((report.syncs, report.wasted, report.missed))
            step(optimizer)
    return outcome(report, seen=seen)


@loop()
def finished_by_a_backward_of_its_own():
    """gradsync's DDP behind a bare module has one parameter more, whose own backward completes the reduction."""
    model = mlp()
    shell = nn.Module()
    shell.ledger = nn.Parameter(torch.zeros(6))
    shell.module = model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    made: dict[str, DistributedDataParallel] = {}
    find_engines.behind = watch.behind = lambda module: made.get("ddp") if module is model else None
    with audit(model, optimizer) as report:
        made["ddp"] = ddp = DistributedDataParallel(shell)  # made inside the audit, as at the first call
        del ddp.module
        for _ in range(WINDOWS):
            for i in range(STEPS):
                loss = model(batch()).sum()
                if i == STEPS - 1:
                    arm(ddp)
                loss.backward()
            shell.ledger.backward(torch.ones(6))
            step(optimizer)
    return outcome(report)


@loop()
def loss_in_two_parts():
    """One armed forward, two backwards: they make one synchronisation together."""

    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(5, 6), nn.Linear(5, 5)

        def forward(self, x):
            return self.a(x).sum(), self.b(x).sum()

    model, optimizer = make(Two(), bucket_cap_mb=1e-5)
    with audit(model, optimizer) as report:
        for _ in range(WINDOWS):
            a, b = model(batch())
            a.backward()
            b.backward()
            step(optimizer)
    return outcome(report)


@loop()
def accelerate_accumulate():
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=STEPS)
    module = mlp()
    model, optimizer = accelerator.prepare(module, torch.optim.SGD(module.parameters(), lr=0.1))
    with audit(model, optimizer) as report:
        for _ in range(WINDOWS * STEPS):
            with accelerator.accumulate(model):
                accelerator.backward(model(batch()).sum())
                optimizer.step()
                optimizer.zero_grad()
    return outcome(report, wrapped=[type(model).__name__, type(optimizer).__name__])


@loop()
def fabric_no_backward_sync():
    from lightning_fabric import Fabric
    from lightning_fabric.plugins.environments import TorchElasticEnvironment

    fabric = Fabric(accelerator="cpu", devices=dist.get_world_size(), strategy="ddp", plugins=TorchElasticEnvironment())
    fabric.launch()
    module = mlp()
    model, optimizer = fabric.setup(module, torch.optim.SGD(module.parameters(), lr=0.1))
    with audit(model, optimizer) as report:
        for _ in range(WINDOWS):
            for i in range(STEPS):
                with fabric.no_backward_sync(model, enabled=i < STEPS - 1):
                    fabric.backward(model(batch()).sum())
            optimizer.step()
            optimizer.zero_grad()
    return outcome(report, wrapped=[type(model).__name__, type(optimizer).__name__])


@loop()
def compiled_both_ways():
    numbers = []
    for compiled_outside in (True, False):
        if compiled_outside:
            inner = DistributedDataParallel(mlp())
            model = torch.compile(inner, backend="eager")
        else:
            model = inner = DistributedDataParallel(torch.compile(mlp(), backend="eager"))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with audit(model, optimizer) as report:
            for _ in range(WINDOWS):
                for i in range(STEPS):
                    with nullcontext() if i in {1, STEPS - 1} else inner.no_sync():
                        model(batch()).sum().backward()
                step(optimizer)
        numbers.append((report.backwards, report.syncs, report.updates, report.wasted, report.missed))
    return outcome(report, numbers=numbers)


@loop()
def reentrant_checkpoints():
    """Each segment's backward is a graph of its own inside the one backward that the loop runs."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = mlp()

        def forward(self, x):
            for layer in self.inner:
                x = checkpoint(layer, x.requires_grad_() if x.is_leaf else x, use_reentrant=True)
            return x

    return outcome(windows(*make(Model()), {1, STEPS - 1}))


@loop()
def composable_replicate():
    from torch.distributed._composable.replicate import replicate

    model = replicate(mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with audit(model, optimizer) as report:  # its DDP is made in the first forward, inside
        for _ in range(WINDOWS):
            for i in range(STEPS):
                model.set_requires_gradient_sync(i in {1, STEPS - 1})
                model(batch()).sum().backward()
            step(optimizer)
    return outcome(report)


# -- several models, bystanders ------------------------------------------------------------------------------------


@loop()
def engines_inside_a_larger_module():
    class Larger(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = DistributedDataParallel(nn.Linear(5, 6)), DistributedDataParallel(nn.Linear(6, 4))

        def forward(self, x):
            return self.b(self.a(x))

    model = Larger()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with audit(model, optimizer) as report:
        for _ in range(WINDOWS):
            for i in range(STEPS):
                # `a` is held as it should be; `b` never is.
                with model.a.no_sync() if i < STEPS - 1 else nullcontext():
                    model(batch()).sum().backward()
            step(optimizer)
    return outcome(report)


@loop()
def bare_head_on_a_wrapped_trunk():
    model = nn.Sequential(DistributedDataParallel(nn.Linear(5, 6)), nn.Linear(6, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with audit(model, optimizer) as report:
        for _ in range(WINDOWS):
            model(batch()).sum().backward()
            step(optimizer)
    return outcome(report)


@loop()
def bystander_model():
    """Backwards of a model that is not audited, between and together with those that are."""
    model, optimizer = make()
    other, others = make(nn.Linear(5, 5))
    with audit(model, optimizer) as report:
        for _ in range(WINDOWS):
            for i in range(STEPS):
                with model.no_sync() if i < STEPS - 1 else nullcontext():
                    model(other(batch())).sum().backward()
                other(batch()).sum().backward()
            step(others)
            step(optimizer)
    return outcome(report, others=WINDOWS * STEPS * 2)


def gan(*, held):
    (g, g_optimizer), (d, d_optimizer) = make(nn.Linear(5, 5)), make(nn.Linear(5, 7))
    with audit((g, d), (g_optimizer, d_optimizer)) as report:
        for _ in range(WINDOWS):
            d(g(batch()).detach()).sum().backward()
            step(d_optimizer)
            d.requires_grad_(not held)
            d(g(batch())).sum().backward()
            d.requires_grad_(True)
            step(g_optimizer)
            d_optimizer.zero_grad()
    return outcome(report)


@loop()
def gan_with_the_other_model_held():
    return gan(held=True)


@loop()
def gan_polluted():
    return gan(held=False)


@loop()
def scaler_that_skips():
    """A window whose step the scaler skips is not followed by one: its synchronisation was needed all the same."""
    texts = []
    for set_to_none in (True, False):
        model, optimizer = make()
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
        with audit(model, optimizer) as report:
            for window in range(WINDOWS):
                for i in range(STEPS):
                    with model.no_sync() if i < STEPS - 1 else nullcontext():
                        loss = model(batch()).sum() * (float("inf") if window == 1 else 1.0)
                        scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad(set_to_none=set_to_none)
        texts.append(outcome(report))
    return {**texts[0], "in_place": texts[1]}


# -- the audit itself ----------------------------------------------------------------------------------------------


def hooks(model, optimizer):
    return (
        [len(p._post_accumulate_grad_hooks or {}) for p in model.parameters()],
        [len(p._backward_hooks or {}) for p in model.parameters()],
        len(optimizer._optimizer_step_pre_hooks) + len(optimizer._optimizer_step_post_hooks),
        [sorted(module.__dict__) for module in model.modules()],
        sorted(optimizer.__dict__),
    )


@loop()
def a_loop_that_raises():
    model, optimizer = make()
    step_once = windows(model, optimizer, {STEPS - 1}, n=1)
    optimizer.register_step_pre_hook(lambda *_: None)
    before = hooks(model, optimizer)
    broken = False
    try:
        with audit(model, optimizer) as report:
            for i in range(STEPS):
                with model.no_sync() if i < STEPS - 1 else nullcontext():
                    loss = model(batch()).sum()
                    if i == 1:
                        # Breaks off in the middle of a backward; the loop drops the micro-batch and goes on.
                        handle = model.module[0].bias.register_hook(lambda _: 1 / 0)
                        try:
                            loss.backward()
                        except ZeroDivisionError:
                            broken = True
                        handle.remove()
                        continue
                    loss.backward()
            step(optimizer)
            raise KeyError("the loop's own")
    except KeyError:
        pass
    return outcome(report, same=hooks(model, optimizer) == before, broken=broken, first=step_once.syncs)


@loop()
def nested_audits():
    model, optimizer = make()
    before = hooks(model, optimizer)
    with audit(model, optimizer) as outer:
        model(batch()).sum().backward()
        with audit(model, optimizer) as inner:
            live = [inner.syncs, outer.syncs]
            model(batch()).sum().backward()
            live += [inner.syncs, outer.syncs]
        step(optimizer)
    same = hooks(model, optimizer) == before
    inner_numbers = (inner.backwards, inner.syncs, inner.updates, inner.wasted)
    return outcome(outer, live=live, inner=inner_numbers, same=same)


@loop()
def a_wrapper_after_a_ddp_behind():
    """The DDP that was behind the module once has nothing to do with it now."""
    module = mlp()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for micro in gradsync.sync_every(module, 1):
        micro.backward(module(batch()).sum())
        step(optimizer)
        break
    optimizer.zero_grad()
    model = gradsync.ddp(module)
    with audit(model, optimizer) as report:
        with gradsync.no_sync(model):
            model(batch()).sum().backward()
        gradsync.sync_gradients(model)
        step(optimizer)
    return outcome(report)


@loop()
def engines_that_it_cannot_see_into():
    from torch.distributed.fsdp import FullyShardedDataParallel

    told = []
    with torch._dynamo.config.patch(optimize_ddp="python_reducer"):
        python_reducer = make()
    module = mlp()
    delayed = make(
        module, delay_all_reduce_named_params=[("0.bias", module[0].bias)], param_to_hook_all_reduce=module[0].weight
    )
    sharded = FullyShardedDataParallel(mlp(), device_id=torch.device("cpu"))
    for model, optimizer in (python_reducer, delayed, (sharded, torch.optim.SGD(sharded.parameters(), lr=0.1))):
        before = hooks(model, optimizer)
        try:
            with audit(model, optimizer):
                pass
        except GradSyncError as error:
            told.append(str(error))
        assert hooks(model, optimizer) == before
    return {"told": told}


# -- sharded -------------------------------------------------------------------------------------------------------


def shard(mesh=None, **kwargs):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = mesh or init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh, **kwargs)
    fully_shard(model, mesh=mesh, **kwargs)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def sharded_windows(model, optimizer, synchronising, call="set_requires_gradient_sync"):
    states = [module._get_fsdp_state() for module in model.modules() if hasattr(module, "_get_fsdp_state")]
    with audit(model, optimizer) as report:
        for _ in range(WINDOWS):
            for i in range(STEPS):
                getattr(model, call)(i in synchronising)
                model(torch.randn(2, 8)).sum().backward()
            step(optimizer)
    left = any("_pre_backward" in state.__dict__ for state in states)
    left |= any(getattr(p, "_post_accumulate_grad_hooks", None) for p in model.parameters())
    return outcome(report, left=left)


@loop()
def fsdp2_right():
    return sharded_windows(*shard(), {STEPS - 1})


@loop()
def fsdp2_never_held():
    return sharded_windows(*shard(), range(STEPS))


@loop()
def fsdp2_first_instead_of_last():
    return sharded_windows(*shard(), {0})


@loop()
def fsdp2_tail_never_synchronised():
    return sharded_windows(*shard(), ())


@loop()
def fsdp2_bf16_reduction():
    from torch.distributed.fsdp import MixedPrecisionPolicy

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return sharded_windows(*shard(mp_policy=policy), {1, STEPS - 1})


@loop()
def fsdp2_synchronised_without_a_backward():
    model, optimizer = shard()
    with audit(model, optimizer) as report:
        for _ in range(WINDOWS):
            model.set_requires_gradient_sync(False)
            for _ in range(STEPS):
                model(torch.randn(2, 8)).sum().backward()
            model.set_requires_gradient_sync(True)
            model._get_fsdp_state()._root_post_backward_final_callback()
            step(optimizer)
    return outcome(report)


@loop()
def fsdp2_entered_between_forward_and_backward():
    model, optimizer = shard()
    loss = model(torch.randn(2, 8)).sum()
    with audit(model, optimizer) as report:
        loss.backward()
        step(optimizer)
        loss = model(torch.randn(2, 8)).sum()
    loss.backward()  # after the audit, through what it had hung in
    return outcome(report)


def hsdp():
    from torch.distributed.device_mesh import init_device_mesh

    return shard(init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))


@loop(4)
def hsdp_right():
    return sharded_windows(*hsdp(), {STEPS - 1})


@loop(4)
def hsdp_all_reduce_deferred():
    return sharded_windows(*hsdp(), {STEPS - 1}, call="set_requires_all_reduce")


@loop(4)
def hsdp_never_held():
    return sharded_windows(*hsdp(), range(STEPS))


@loop(4)
def hsdp_all_reduce_never_done():
    return sharded_windows(*hsdp(), (), call="set_requires_all_reduce")


def main(rank, ranks, directory):
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(ranks),
        GROUP_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT="29999", TORCHELASTIC_RUN_ID="audit",
    )  # fmt: skip
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{directory}/store{ranks}",
        rank=rank,
        world_size=ranks,
        timeout=GROUP_TIMEOUT,
    )
    results: dict[str, Any] = {}
    recorder = Recorder()
    only = os.environ.get("AUDIT_LOOP")
    for name, body in LOOPS[ranks].items():
        if only and name != only:
            continue
        original = find_engines.behind
        recorder.since()
        try:
            results[name] = body()
        except BaseException:  # noqa: BLE001 -- it is told by the test of this loop, and the next would only hang
            results[name] = {"failed": traceback.format_exc()}
            break
        finally:
            find_engines.behind = watch.behind = original
        results[name]["collectives"] = recorder.since()
        dist.barrier()
    Path(directory, f"{ranks}-{rank}.json").write_text(json.dumps(results))
    if "failed" in results.get(name, {}):
        os._exit(1)
    # Threads of gloo's may outlive destroy_process_group and end the process badly: everything is written, so just go.
    dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
