"""The CPU cost of a micro-step of a tiny model, each way interleaved with the others in one run.

    python -m tests.measure.speed                                            # one rank
    python -m tests.measure.speed --layers 100 --micro-steps 40              # 200 parameters
    python -m tests.measure.speed --layers 100 --micro-steps 40 --find-unused
    torchrun --standalone --nproc-per-node 2 -m tests.measure.speed          # two

Best of several rounds, in microseconds, and as a ratio to the hand-written `no_sync` loop.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import tempfile
import time
import warnings

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import gradsync

STEPS = 4


def tiny(layers):
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(8, 8) for _ in range(layers))) if layers > 1 else nn.Linear(8, 8)


def plain(model, optimizer, batches):
    for i, x in enumerate(batches):
        (model(x).sum() / STEPS).backward()
        if i % STEPS == STEPS - 1:
            optimizer.step()
            optimizer.zero_grad()


def by_hand(model, optimizer, batches):
    for i, x in enumerate(batches):
        last = i % STEPS == STEPS - 1
        with contextlib.nullcontext() if last else model.no_sync():
            (model(x).sum() / STEPS).backward()
        if last:
            optimizer.step()
            optimizer.zero_grad()


@gradsync.accumulating(steps=STEPS)
def train_step(model, optimizer, x):
    return model(x).sum()


def decorated(model, optimizer, batches):
    for x in batches:
        train_step(model, optimizer, x)


def decorated_over(model, optimizer, batches):
    for x in train_step.over(batches):
        train_step(model, optimizer, x)


def iterated(model, optimizer, batches):
    for step, x in gradsync.sync_every(model, STEPS, batches):
        step.backward(model(x).sum())
        if step.last:
            optimizer.step()
            optimizer.zero_grad()


def ways(layers=1, **options):
    """Name, function, model, optimizer; every way has a model of its own, and each DDP these options."""
    ddp = functools.partial(DDP, **options)

    def pair(wrap):
        model = tiny(layers)
        wrapped = wrap(model)
        return wrapped, torch.optim.SGD(model.parameters(), lr=1e-3)

    yield "no engine", plain, *pair(lambda m: m)
    yield "no_sync by hand", by_hand, *pair(ddp)
    with contextlib.suppress(ImportError):
        from accelerate import Accelerator

        accelerator = Accelerator(gradient_accumulation_steps=STEPS, cpu=True)
        model = tiny(layers)
        wrapped, optimizer = accelerator.prepare(ddp(model), torch.optim.SGD(model.parameters(), lr=1e-3))

        def accelerate(model, optimizer, batches):
            for x in batches:
                with accelerator.accumulate(model):
                    accelerator.backward(model(x).sum())
                    optimizer.step()
                    optimizer.zero_grad()

        yield "Accelerate accumulate", accelerate, wrapped, optimizer
    with contextlib.suppress(ImportError):
        from lightning_fabric import Fabric
        from lightning_fabric.strategies import DDPStrategy

        os.environ.setdefault("LT_CLI_USED", "0")
        fabric = Fabric(accelerator="cpu", devices=dist.get_world_size(), strategy=DDPStrategy(process_group_backend="gloo", **options))
        fabric._launched = True
        model = tiny(layers)
        wrapped, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=1e-3))

        def fabric_way(model, optimizer, batches):
            for i, x in enumerate(batches):
                last = i % STEPS == STEPS - 1
                with fabric.no_backward_sync(model, enabled=not last):
                    fabric.backward(model(x).sum() / STEPS)
                if last:
                    optimizer.step()
                    optimizer.zero_grad()

        yield "Fabric no_backward_sync", fabric_way, wrapped, optimizer
    yield "accumulating, bare model", decorated, *pair(lambda m: m)
    yield "accumulating, DDP model", decorated, *pair(ddp)
    yield "accumulating.over, DDP model", decorated_over, *pair(ddp)
    yield "sync_every, bare model", iterated, *pair(lambda m: m)
    yield "sync_every, DDP model", iterated, *pair(ddp)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--micro-steps", type=int, default=400)
    parser.add_argument("--layers", type=int, default=1, help="of two parameters each")
    parser.add_argument("--find-unused", action="store_true", help="on DDPs with find_unused_parameters=True")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", init_method=f"file://{tempfile.mktemp()}", rank=0, world_size=1)
    batches = list(torch.randn(args.micro_steps, 4, 8))
    candidates = list(ways(args.layers, **({"find_unused_parameters": True} if args.find_unused else {})))
    best = dict.fromkeys((name for name, *_ in candidates), float("inf"))
    for _ in range(args.rounds + 1):
        for name, run, model, optimizer in candidates:
            dist.barrier()
            start = time.perf_counter()
            run(model, optimizer, batches)
            best[name] = min(best[name], (time.perf_counter() - start) / args.micro_steps * 1e6)
    if dist.get_rank() == 0:
        print(f"{dist.get_world_size()} rank(s), windows of {STEPS}, best of {args.rounds} rounds")
        for name, cost in best.items():
            print(f"{name:<30} {cost:7.1f} us   {cost / best['no_sync by hand']:5.2f} of no_sync by hand")
    dist.barrier()
    os._exit(0)


main()
