"""What holding and releasing an FSDP2 model costs a micro-step, in microseconds.

    python -m tests.measure.switching
"""

from __future__ import annotations

import timeit

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from gradsync.engines import find


def blocks(number: int, layers: int) -> nn.Module:
    return nn.Sequential(*(nn.Sequential(*(nn.Linear(4, 4) for _ in range(layers))) for _ in range(number)))


def best(function) -> float:
    return min(timeit.repeat(function, number=200, repeat=15)) / 200 * 1e6


def main() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    torch.set_num_threads(1)
    print(f"{'modules':>8} {'groups':>7} {'hold+restore':>13} {'and arm':>8} {'set_requires_gradient_sync x2':>30}")
    for number, layers in ((4, 4), (16, 14), (32, 14), (80, 9)):
        model = blocks(number, layers)
        for block in model:
            fully_shard(block)
        fully_shard(model)
        (engine,) = find([model])

        def held(engine=engine) -> None:
            engine.restore(engine.hold())

        def boundary(engine=engine) -> None:
            found = engine.hold()
            engine.arm(None)
            engine.restore(found)

        def torchs(model=model) -> None:
            model.set_requires_gradient_sync(False)
            model.set_requires_gradient_sync(True)

        num_modules = len(list(model.modules()))
        print(f"{num_modules:8} {number:7} {best(held):13.2f} {best(boundary):8.2f} {best(torchs):30.1f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
