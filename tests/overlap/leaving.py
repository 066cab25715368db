"""Two ranks, forked, that end with gradients in flight; run by test_beside.py: `python -m tests.overlap.leaving port`."""

import os
import sys
import tempfile

import torch
import torch.distributed as dist

import gradsync


def train_step(model, optimizer):
    return model(torch.ones(1, 2)).sum()


def train() -> list[torch.Tensor]:
    """The parameters before the update that is not made, and as the function was left."""
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train.step = gradsync.accumulating(2, overlap=2)(train_step)
    before = model.weight.detach().clone()
    for _ in range(2):
        train.step(model, optimizer)
    assert not torch.equal(model.weight, before), "provisional"
    return [model.weight, before]


def run(rank: int, port: str, store: str) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    os.environ["MASTER_PORT"] = port
    with gradsync.process_group("gloo"):
        weight, before = train()
    assert torch.equal(weight, before), "put back"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    train()


if __name__ == "__main__":
    store = os.path.join(tempfile.mkdtemp(), "store")
    child = os.fork()
    run(int(child == 0), sys.argv[1], store)
    if child:
        sys.exit(os.waitpid(child, 0)[1])
