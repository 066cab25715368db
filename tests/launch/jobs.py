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
import traceback

import torch
import torch.distributed as dist

import gradsync


def say(*words: object) -> None:
    print(*words, flush=True)


def place(backend: str = "") -> None:
    """Where a rank is, and on what."""
    with gradsync.process_group(backend or None, timeout=30) as world:
        say(world.rank, world.world_size, world.local_rank, world.device, dist.get_backend(), dist.is_initialized())
        dist.all_reduce(torch.ones(1, device=world.device))  # one that leaves at once breaks the other's connecting
    say("initialised afterwards:", dist.is_initialized())


def wrapped() -> None:
    """A model on the device of its rank."""
    with gradsync.process_group(timeout=30) as world:
        model = gradsync.ddp(torch.nn.Linear(2, 1).to(world.device))
        say(type(model).__name__, model.device_ids, gradsync.ddp(model) is model)


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


def own_group(timeout: str) -> None:
    """What the group's timeout is."""
    with gradsync.process_group(timeout=float(timeout)) as world:
        backend = dist.group.WORLD._get_backend(torch.device("cpu"))
        say("timeout", backend.options._timeout.total_seconds(), world.rank)


def leave_the_device(job, *arguments: str) -> None:
    """As Python ends a program, without its last step: there gloo, which is inside the fake backend, may hang or crash.

    It is pytorch#190489, which gradsync mends for groups of gloo's own.
    """
    code = 0
    try:
        job(*arguments)
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    program = globals()[sys.argv[1]]
    if os.environ.get("FAKE_DEVICE"):
        leave_the_device(program, *sys.argv[2:])
    program(*sys.argv[2:])
