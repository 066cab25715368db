"""Two ranks that end with gradients in flight, for test_beside.py."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import socket
import sys
from pathlib import Path

import torch
import torch.distributed as dist

import gradsync
from tests.support.ranks import PATIENCE, PRELOADED


def train_step(model, optimizer):
    return model(torch.ones(1, 2)).sum()


def train() -> list[torch.Tensor]:
    """The parameters before the update that is not made, and as the function was left."""
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train.kept = gradsync.accumulating(2, overlap=2)(train_step), model, optimizer
    before = model.weight.detach().clone()
    for _ in range(2):
        train.kept[0](model, optimizer)
    assert not torch.equal(model.weight, before), "provisional"
    return [model.weight, before]


def run(rank: int, port: str, folder: Path) -> None:
    """One rank: what it prints goes to a file."""
    os.dup2(os.open(folder / f"printed{rank}", os.O_WRONLY | os.O_CREAT), 2)
    sys.stderr = os.fdopen(2, "w", buffering=1)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1"}
    os.environ["MASTER_PORT"] = port
    with gradsync.process_group("gloo"):
        weight, before = train()
    assert torch.equal(weight, before), "put back"
    dist.init_process_group("gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=2)
    train()
    atexit._run_exitfuncs()  # as the interpreter does; a process that was forked for a function ends without


def printed(folder: Path) -> list[str]:
    """What each rank has printed; they are forked from a process that has imported torch."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    processes = [context.Process(target=run, args=(rank, port, folder), daemon=True) for rank in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(30 * PATIENCE)
        if process.is_alive():
            process.kill()
            process.join()
    found = [(folder / f"printed{rank}").read_text() for rank in range(2)]
    assert [process.exitcode for process in processes] == [0, 0], found
    return found
