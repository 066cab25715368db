"""What a window's gradients take on each rank, by engine and `sync`, in units of all the model's gradients.

    python -m tests.measure.memory
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

import gradsync
from gradsync.engines import attach
from tests.support.ranks import Ranks

WIDTH, DEPTH, STEPS = 256, 8, 4

# name: (mesh, sync, gathered)
WAYS = {
    "DDP": (None, "window", False),
    "FSDP2 on 4, window": ((4,), "window", False),
    "FSDP2 on 4, window, kept gathered": ((4,), "window", True),
    "FSDP2 on 4, each": ((4,), "each", False),
    "HSDP 2 x 2, window": ((2, 2), "window", False),
    "HSDP 2 x 2, shard": ((2, 2), "shard", False),
    "HSDP 2 x 2, each": ((2, 2), "each", False),
}


def held(engines) -> int:
    """Bytes of the gradients that lie somewhere now; parts of one storage once."""
    tensors = []
    for engine in engines:
        tensors += [p.grad for p in engine.parameters]
        for group in getattr(engine, "_groups", ()):
            tensors.append(group._partial_reduce_output)
            for param in group.fsdp_params:
                tensors += [getattr(getattr(param, "_unsharded_param", None), "grad", None)]
                tensors += [param.unsharded_accumulated_grad]
    local = [getattr(t, "_local_tensor", t) for t in tensors if t is not None]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in local}.values())


def gathered(engines) -> int:
    """Bytes of parameters that stay gathered."""
    params = [param for engine in engines for group in getattr(engine, "_groups", ()) for param in group.fsdp_params]
    return sum(t.untyped_storage().nbytes() for param in params for t in param.all_gather_outputs)


def measure(name: str) -> tuple[float, float, float]:
    shape, sync, keep = WAYS[name]
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH)))
    total = sum(p.numel() * p.element_size() for p in model.parameters())
    home: nn.Module = model
    if shape is None:
        home = nn.parallel.DistributedDataParallel(model)
    else:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicas", "shards")[-len(shape) :])
        for layer in model:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        if keep:
            model.set_reshard_after_backward(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)

    @gradsync.accumulating(STEPS, sync=sync)
    def step(model, optimizer):
        return model(torch.ones(2, WIDTH)).square().mean()

    engines = attach([home])
    between = peak = params = 0
    for index in range(2 * STEPS):
        handles = []
        if index >= STEPS:  # what a gradient finds as it arrives, in the second window
            def arrived(gradient):
                nonlocal peak
                peak = max(peak, held(engines) + gradient.untyped_storage().nbytes())

            handles = [leaf.register_hook(arrived) for engine in engines for leaf in engine.leaves]
        step(home, optimizer)
        for handle in handles:
            handle.remove()
        if index % STEPS < STEPS - 1:
            between = max(between, held(engines))
            params = max(params, gathered(engines))
    return between / total, max(peak, between) / total, params / total


def main() -> None:
    ranks = Ranks(4)
    print("| engine, sync | gradients held between micro-batches | at most in a backward | parameters kept gathered |")
    print("|---|---:|---:|---:|")
    for name in WAYS:
        between, peak, params = max(ranks.run(measure, name))
        print(f"| {name} | {between:.2f} | {peak:.2f} | {params:.2f} |")
    ranks.stop()
    assert not dist.is_initialized()


if __name__ == "__main__":
    main()
