"""Programs of one rank for the tests of launching, as somebody would write them: what they print is read.

    python -m tests.launch.jobs NAME [ARGUMENT]

With the fake device where FAKE_DEVICE is set.
"""

from __future__ import annotations

import os
import sys

if os.environ.get("FAKE_DEVICE"):
    import tests.device.fake  # noqa: F401 - before torch

import time

import torch
import torch.distributed as dist

import gradsync


def say(*words: object) -> None:
    print(*words, flush=True)


def place(backend: str = "") -> None:
    """Where a rank is, and on what."""
    with gradsync.process_group(backend or None, timeout=30) as world:
        say(world.rank, world.world_size, world.local_rank, world.device, dist.get_backend(), dist.is_initialized())
    say("initialised afterwards:", dist.is_initialized())


def wrapped() -> None:
    """A model on the device of its rank."""
    with gradsync.process_group(timeout=30) as world:
        model = gradsync.ddp(torch.nn.Linear(2, 1).to(world.device))
        say(type(model).__name__, model.device_ids, gradsync.ddp(model) is model)


def raises(ending: str = "ValueError") -> None:
    """The second rank ends early while the first waits for it in an all_reduce."""
    with gradsync.process_group(timeout=30) as world:
        if world.rank == 1:
            if ending == "exit 0":
                sys.exit(0)
            raise ValueError("on purpose")
        began = time.monotonic()
        try:
            dist.all_reduce(torch.ones(1, device=world.device))
        except RuntimeError:
            say("released")
            assert time.monotonic() - began < 25, "by the timeout, and not by the other rank's leaving"
            raise


def own_group(timeout: str) -> None:
    """What the group's timeout is."""
    with gradsync.process_group(timeout=float(timeout)) as world:
        backend = dist.group.WORLD._get_backend(torch.device("cpu"))
        say("timeout", backend.options._timeout.total_seconds(), world.rank)


def two_without() -> None:
    """ddp without a process group."""
    try:
        gradsync.ddp(torch.nn.Linear(1, 1))
    except gradsync.GradSyncError as error:
        say(error)


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
