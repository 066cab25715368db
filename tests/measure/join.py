"""What uneven ranks cost: `accumulating.over` against torch's `Join`, interleaved in one run.

    torchrun --standalone --nproc-per-node 2 -m tests.measure.join

Microseconds that each adds to a micro-step of a tiny model on DDP with buffers left out, lengths known and unknown:
the median of the differences within each round, and how far that median is from certain (by bootstrap). Over the whole
loop, and from its first quarter on: ranks that have just met run faster than ranks in the middle of their work. On a
machine with as few cores as ranks a single round says nothing; `--rounds 150` takes four minutes or so.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel as DDP

import gradsync

STEPS, MICRO_STEPS = 4, 400


def pair(wrap):
    torch.manual_seed(0)
    model = nn.Linear(8, 8)
    return wrap(model), torch.optim.SGD(model.parameters(), lr=1e-3)


@gradsync.accumulating(steps=STEPS)
def train_step(model, optimizer, x):
    return model(x).sum()


class Clock:
    """When a loop began, when its first quarter was over, and when it ended."""

    def __init__(self, batches) -> None:
        self.batches, self.times = batches, []

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self):
        for number, x in enumerate(self.batches):
            if number == MICRO_STEPS // 4:
                self.times.append(time.perf_counter())
            yield x


def every_step(model, optimizer, batches):
    for x in batches:
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def with_join(model, optimizer, batches):
    with Join([model]):
        every_step(model, optimizer, batches)


def plain(model, optimizer, batches):
    for x in batches:
        train_step(model, optimizer, x)


def known(model, optimizer, batches):
    for x in train_step.over(batches):
        train_step(model, optimizer, x)


def unknown(model, optimizer, batches):
    for x in train_step.over(iter(batches)):
        train_step(model, optimizer, x)


def median_and_doubt(values: list[float], generator: random.Random) -> tuple[float, float]:
    """The median, and the standard deviation of the medians of samples drawn from the same values."""
    medians = [statistics.median(generator.choices(values, k=len(values))) for _ in range(300)]
    return statistics.median(values), statistics.stdev(medians)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=40)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    batches = list(torch.randn(MICRO_STEPS, 4, 8))
    # `.over` and without it on the same model, in an order of its own each round: both make more of a difference here.
    # Not so Join, which slows a model down for good.
    wrapped, bare = pair(DDP), pair(lambda m: m)
    ways = {
        "DDP, each step": (every_step, *pair(DDP)),
        "DDP, each step, Join": (with_join, *pair(DDP)),
        "accumulating, DDP": (plain, *wrapped),
        "accumulating.over, DDP, known": (known, *wrapped),
        "accumulating.over, DDP, unknown": (unknown, *wrapped),
        "accumulating, bare": (plain, *bare),
        "accumulating.over, bare, known": (known, *bare),
        "accumulating.over, bare, unknown": (unknown, *bare),
    }
    order = random.Random(0)  # noqa: S311 - the same on every rank
    costs: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}  # the whole loop, from its first quarter on
    for _ in range(rounds):
        for name in order.sample(list(ways), len(ways)):
            run, model, optimizer = ways[name]
            dist.barrier()
            clock, start = Clock(batches), time.perf_counter()
            run(model, optimizer, clock)
            end = time.perf_counter()
            quarter = clock.times[0]
            costs[name].append(((end - start) / MICRO_STEPS * 1e6, (end - quarter) / (0.75 * MICRO_STEPS) * 1e6))
    if dist.get_rank() == 0:

        def added(name: str, base: str, part: int) -> tuple[float, float]:
            return median_and_doubt([a[part] - b[part] for a, b in zip(costs[name], costs[base], strict=True)], order)

        for part, title in enumerate(("the whole loop", "from its first quarter on")):
            join, join_doubt = added("DDP, each step, Join", "DDP, each step", part)
            print(f"{title}: {dist.get_world_size()} ranks, {rounds} rounds, us a micro-step")
            print(f"Join adds {join:.0f} +- {join_doubt:.0f}")
            for name, several in costs.items():
                adds = ""
                if "over" in name:
                    cost, doubt = added(name, "accumulating, bare" if "bare" in name else "accumulating, DDP", part)
                    adds = f"adds {cost:4.0f} +- {doubt:2.0f}, {cost / join:5.2f} +- {doubt / join:.2f} of Join's"
                print(f"{name:<34}{statistics.median(one[part] for one in several):8.1f}  {adds}")
    dist.barrier()
    os._exit(0)


main()
