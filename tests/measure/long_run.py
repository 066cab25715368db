"""Whether memory grows over 100,000 micro-steps: this process's, and the number of Python's objects.

    python -m tests.measure.long_run
    torchrun --standalone --nproc-per-node 2 -m tests.measure.long_run
"""

from __future__ import annotations

import gc
import os
from pathlib import Path

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradsync

STEPS, PART, PARTS = 4, 10_000, 10


def by_hand(model, optimizer):
    for i in range(PART):
        (model(torch.ones(4, 8)).sum() / STEPS).backward()
        if i % STEPS == STEPS - 1:
            optimizer.step()
            optimizer.zero_grad()


@gradsync.accumulating(steps=STEPS)
def train_step(model, optimizer, x):
    return model(x).sum()


def calls(model, optimizer):
    for _ in range(PART):
        train_step(model, optimizer, torch.ones(4, 8))


def over(model, optimizer):
    for _ in train_step.over(range(PART)):
        train_step(model, optimizer, torch.ones(4, 8))


def sync_every(model, optimizer):
    for step, _ in gradsync.sync_every(model, STEPS, range(PART)):
        step.backward(model(torch.ones(4, 8)).sum())
        if step.last:
            optimizer.step()
            optimizer.zero_grad()


def now() -> tuple[float, int]:
    """The resident memory in MiB, and how many objects the garbage collector knows."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20, len(gc.get_objects())


def main() -> None:
    with gradsync.process_group() as world:
        torch.set_num_threads(1)
        for loop in (by_hand, calls, over, sync_every):
            model = nn.Linear(8, 8)
            if loop is by_hand and world.world_size > 1:
                model = DistributedDataParallel(model)
            optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
            loop(model, optimizer)
            memory, objects = now()
            for _ in range(PARTS - 1):
                loop(model, optimizer)
            more_memory, more_objects = now()
            if world.rank == 0:
                print(
                    f"{loop.__name__:<12}{PART:,} micro-steps: {memory:.1f} MiB; {PART * PARTS:,}: "
                    f"{more_memory - memory:+.2f} MiB, {more_objects - objects:+d} objects"
                )


if __name__ == "__main__":
    main()
