"""A process that trains under a limit of its own on address space; run by `test_memory.py`."""

import json
import resource
import sys

import torch

import gradsync

ROWS, WIDTH, DEPTH, STEPS, WINDOW = 16384, 64, 8, 2, 2


def address_space():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * resource.getpagesize()


def train_step(model, optimizer, x, y):
    return torch.nn.functional.mse_loss(model(x), y)


def train(limit_mb=None, **options):
    """What the parameters are after some updates, and in how many parts each call ran."""
    torch.manual_seed(0)
    layers = [layer for _ in range(DEPTH) for layer in (torch.nn.Linear(WIDTH, WIDTH), torch.nn.GELU())]
    model = torch.nn.Sequential(*layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    batches = [torch.randn(2, ROWS, WIDTH) for _ in range(STEPS * WINDOW)]
    tiny = torch.randn(2, WIDTH)
    train_step(model, optimizer, tiny, tiny).backward()  # libraries are loaded, and threads begun
    optimizer.zero_grad()
    if limit_mb is not None:
        limit = address_space() + (limit_mb << 20)
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    step = gradsync.accumulating(WINDOW, **options)(train_step)
    ran = []
    for x, y in batches:
        step(model, optimizer, x, y)
        ran.append((step.progress.parts, step.progress.rows))
    return [[p.double().sum().item(), p.double().norm().item()] for p in model.parameters()], ran


if __name__ == "__main__":
    torch.set_num_threads(1)
    error = None
    try:
        train(int(sys.argv[1]))
    except (RuntimeError, MemoryError) as raised:
        error = str(raised)
    print(json.dumps([error, *train(fit=True)]))
