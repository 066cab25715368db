"""A process that trains under a limit of its own on address space; run by `test_memory.py`."""

import json
import resource
import sys

import torch

torch.set_num_threads(1)

from gradsync.parts import Fit, Work, run_in_parts  # noqa: E402

ROWS, WIDTH, DEPTH, STEPS, WINDOW = 4096, 512, 8, 4, 2


def address_space():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * resource.getpagesize()


def make():
    torch.manual_seed(0)
    layers = [layer for _ in range(DEPTH) for layer in (torch.nn.Linear(WIDTH, WIDTH), torch.nn.GELU())]
    return torch.nn.Sequential(*layers)


def train_step(model, x, y):
    return torch.nn.functional.mse_loss(model(x), y)


def main(limit_mb):
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    fit = Fit(name="train_step")
    batches = []
    for index in range(STEPS * WINDOW):
        generator = torch.Generator().manual_seed(index)
        batches.append(tuple(torch.randn(ROWS, WIDTH, generator=generator) for _ in range(2)))
    tiny = torch.randn(2, WIDTH)
    train_step(model, tiny, tiny).backward()  # libraries are loaded, and threads begun
    optimizer.zero_grad()
    if limit_mb:
        limit = address_space() + (limit_mb << 20)
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    ran = []
    for step in range(STEPS):
        fit.open([model])
        for index in range(WINDOW):
            work = Work(
                train_step,
                lambda loss, weight, _: (loss / WINDOW).backward(torch.full_like(loss, weight)),
                list(model.parameters()),
                scale=lambda loss: loss / WINDOW,
            )
            outcome = run_in_parts(work, (model, *batches[step * WINDOW + index]), {}, fit)
            ran.append((outcome.parts, outcome.rows))
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        sums = [parameter.double().sum().item() for parameter in model.parameters()]
        norms = [parameter.double().norm().item() for parameter in model.parameters()]
    print(json.dumps({"sums": sums, "norms": norms, "ran": ran}))


if __name__ == "__main__":
    main(int(sys.argv[1]))
