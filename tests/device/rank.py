"""Ranks on the fake device: a process that imports torch once, and forks the ranks of each job that it is told.

    python -m tests.device.rank        # started by `tests.device.jobs`; a job is a line of JSON on standard input

Each rank is a process of its own, so that no job finds anything of the one before. It runs a case and leaves what it
returned, or its traceback, in a file.
"""

from __future__ import annotations

from tests.device import fake  # noqa: F401 - before torch, I001

import contextlib
import importlib
import json
import os
import pickle
import signal
import sys
import time
import traceback
import warnings
from datetime import timedelta
from pathlib import Path

import torch
import torch._dynamo  # the first optimizer brings it in, which takes seconds
import torch.distributed as dist
import torch.distributed.fsdp  # noqa: F401

import gradsync  # noqa: F401

GROUP_TIMEOUT = timedelta(seconds=40)  # shorter than the limit of a case, so that a rank can say what it waited for


def serve() -> None:
    for line in sys.stdin:
        job = json.loads(line)
        ranks = [fork(job, rank) for rank in range(job["ranks"])]
        print(json.dumps(wait(ranks, job["limit"])), flush=True)


def fork(job: dict, rank: int) -> int:
    if pid := os.fork():
        return pid
    folder, ranks = Path(job["folder"]), job["ranks"]
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for descriptor, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(folder / f"{name}{rank}", os.O_WRONLY | os.O_CREAT), descriptor)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks), **job["environment"])
    code = 1
    try:
        code = main(folder, rank, ranks, joined=job["joined"])
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # the group is left without ceremony: how to leave it well is another test


def wait(ranks: list[int], limit: float) -> list[int | None]:
    """The exit codes; None for those that had to be ended."""
    codes: dict[int, int | None] = {}
    end = time.monotonic() + limit
    while len(codes) < len(ranks) and time.monotonic() < end:
        for pid in set(ranks) - codes.keys():
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                codes[pid] = os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    for pid in set(ranks) - codes.keys():
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return [codes.get(pid) for pid in ranks]


def main(folder: Path, rank: int, ranks: int, *, joined: bool) -> int:
    module, name, args = pickle.loads((folder / "case").read_bytes())
    torch.set_num_threads(1)
    torch.manual_seed(0)
    try:
        if joined and ranks > 1:
            store = f"file://{folder / 'store'}"
            dist.init_process_group("likenccl", init_method=store, rank=rank, world_size=ranks, timeout=GROUP_TIMEOUT)
        case = importlib.import_module(module)
        for part in name.split("."):
            case = getattr(case, part)
        outcome = (True, case(*args))
        if joined:
            _wait_for_the_others()
    except BaseException:
        traceback.print_exc()
        outcome = (False, traceback.format_exc())
    (folder / f"outcome{rank}").write_bytes(pickle.dumps(outcome))
    return 0 if outcome[0] else 1


def _wait_for_the_others() -> None:
    """Leave when all are done: a process that ends takes its connections with it. One that failed does not come."""
    if dist.is_initialized():
        with warnings.catch_warnings(), contextlib.suppress(RuntimeError):
            warnings.simplefilter("ignore")
            dist.barrier()


if __name__ == "__main__":
    serve()
