"""What the audit costs a window: the same loop with and without it, in turn, in one run on two ranks.

    OMP_NUM_THREADS=1 python tests/measure/audit_cost.py [--rounds 200]

Nothing here is asserted. A window is four micro-batches, the last of which synchronises. A round is three windows in
changing order, one of them under an audit, which begins and ends outside of what is timed. What the audit adds is the
median, over the rounds, of the time that the training thread was busy, with the audit less without; the same between
the two windows without says how far to trust it. On a machine that others use too, the wall clock could not: it differs
by several percent between windows that are the same. The wall time of a window without the audit is the yardstick.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from gradsync._audit import audit

STEPS = 4


def mlp(width, layers):
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=200)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        mp.spawn(run, (directory, options), nprocs=2)
        rows = [json.loads(Path(directory, f"{rank}.json").read_text()) for rank in range(2)]
    print(f"{'model, rank':<48}{'window ms':>10}{'audit us':>10}{'noise us':>10}{'cost':>8}")
    for ranks in zip(*rows, strict=True):
        for rank, one in enumerate(ranks):
            numbers = f"{one['window'] * 1e3:>10.3f}{one['audit'] * 1e6:>10.0f}{one['noise'] * 1e6:>10.0f}"
            print(f"{one['name'] + f', {rank}':<48}{numbers}{one['audit'] / one['window']:>8.2%}")


def run(rank, directory, options):
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo", init_method=f"file://{directory}/store", rank=rank, world_size=2)
    rows = []
    for name, width, layers, rows_in_batch, sharded in (
        ("DDP, 6.3M parameters in 96 tensors, batch 8", 362, 48, 8, False),
        ("DDP, 1.1M parameters in 24 tensors, batch 8", 300, 12, 8, False),
        ("DDP, 40 parameters in 4 tensors, batch 2", 4, 2, 2, False),
        ("FSDP2, 1.1M parameters in 12 groups, batch 8", 300, 12, 8, True),
    ):
        model = mlp(width, layers)
        if sharded:
            mesh = init_device_mesh("cpu", (2,))
            for layer in model:
                fully_shard(layer, mesh=mesh)
            fully_shard(model, mesh=mesh)
        else:
            model = DistributedDataParallel(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        x = torch.randn(rows_in_batch, width)
        walls, added, noise = [], [], []
        for turn in range(options.rounds + 6):
            took = {}
            for i in range(3):
                which = ("plain", "again", "audit")[(i + turn) % 3]
                with audit(model, optimizer) if which == "audit" else nullcontext():
                    took[which], wall = timed_window(model, optimizer, x, sharded)
                if which == "plain" and turn >= 6:  # the first ones warm up
                    walls.append(wall)
            added.append(took["audit"] - (took["plain"] + took["again"]) / 2)
            noise.append(took["again"] - took["plain"])
        measured = {"window": walls, "audit": added[6:], "noise": noise[6:]}
        rows.append({"name": name, **{what: statistics.median(values) for what, values in measured.items()}})
    Path(directory, f"{rank}.json").write_text(json.dumps(rows))
    dist.barrier()
    time.sleep(0.2)
    dist.destroy_process_group()


def timed_window(model, optimizer, x, sharded):
    dist.barrier()
    began, busy = time.perf_counter(), time.thread_time()
    for i in range(STEPS):
        if sharded:
            model.set_requires_gradient_sync(i == STEPS - 1)
        with nullcontext() if sharded or i == STEPS - 1 else model.no_sync():
            model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    return time.thread_time() - busy, time.perf_counter() - began


if __name__ == "__main__":
    main()
