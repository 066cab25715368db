"""Programs of one rank for the tests of launching, as somebody would write them: what they print is read.

    python -m tests.launch.jobs NAME

On the fake device they are called in processes that have it (`tests.device.job`).
"""

from __future__ import annotations

import sys
import time

import torch
import torch.distributed as dist

import gradsync


def say(*words: object) -> None:
    print(*words, flush=True)


def place() -> None:
    """Where a rank is, and on what; a model on its device; and the group's time-out."""
    with gradsync.process_group(timeout=77.5) as world:
        say(world.rank, world.world_size, world.local_rank, world.device, dist.get_backend(), dist.is_initialized())
        model = gradsync.ddp(torch.nn.Linear(2, 1).to(world.device))
        say(type(model).__name__, model.device_ids, gradsync.ddp(model) is model)
        backend = dist.group.WORLD._get_backend(world.device)
        say("timeout", backend.options._timeout.total_seconds())
        dist.all_reduce(torch.ones(1, device=world.device))  # one that leaves at once breaks the other's connecting
    say("initialised afterwards:", dist.is_initialized())


def raises() -> None:
    """The second rank ends early while the first waits for it in an all_reduce."""
    with gradsync.process_group(timeout=30) as world:
        dist.all_reduce(torch.ones(1, device=world.device))
        if world.rank == 1:
            raise ValueError("on purpose")
        began = time.monotonic()
        try:
            dist.all_reduce(torch.ones(1, device=world.device))
        except RuntimeError:
            say("released")
            assert time.monotonic() - began < 25, "by the timeout, and not by the other rank's leaving"
            raise


def waits_for_a_lost_rank() -> None:
    """In its second window the device of this rank gets no further."""
    from tests.device.fake import hang

    model = torch.nn.Linear(2, 1)
    with gradsync.process_group(timeout=5) as world:
        model.to(world.device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        @gradsync.accumulating(steps=2)
        def train_step(model, optimizer, inputs):
            if train_step.progress.micro_steps == 3:
                hang()
            return model(inputs).sum()

        for inputs in train_step.over([torch.ones(1, 2, device=world.device)] * 4):
            train_step(model, optimizer, inputs)


if __name__ == "__main__":
    globals()[sys.argv[1]]()
