"""Whole windows on DDP are to the bit what the loop by hand gives."""

from __future__ import annotations

import contextlib

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

import gradsync
from gradsync import accumulating
from tests.support.models import WithBuffers, small_model
from tests.support.reference import mean_loss, micro_batch


def by_hand(ddp, optimizer, data, steps):
    """The loop that everybody means to write; whole windows only."""
    for i, x in enumerate(data):
        last = i % steps == steps - 1
        with contextlib.nullcontext() if last else ddp.no_sync():
            (mean_loss(ddp, x) / steps).backward()
        if last:
            optimizer.step()
            optimizer.zero_grad()


DDPS = {
    "default": {},
    "find_unused": {"find_unused_parameters": True},
    "views": {"gradient_as_bucket_view": True},
    "buckets": {"bucket_cap_mb": 1e-4},
}


def bitwise(config: str, make: str, dtype: str, how: str) -> None:
    """Whole windows: parameters, and the buffers between windows, are to the bit those of the loop by hand."""
    dtype = getattr(torch, dtype)
    torch.set_default_dtype(dtype)
    models = {"small": small_model, "buffers": WithBuffers}
    one, two = models[make]().to(dtype), models[make]().to(dtype)
    hand = DDP(one, **DDPS[config])
    mine = two if how.startswith("bare") else DDP(two, **DDPS[config])
    data = [micro_batch(dist.get_rank(), i, dtype=dtype) for i in range(12)]
    sgd = lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9)  # noqa: E731
    by_hand(hand, sgd(one), data, 3)
    optimizer = sgd(two)
    if how.endswith("sync_every"):
        for micro, x in gradsync.sync_every(mine, 3, data):
            micro.backward(mean_loss(mine, x))
            if micro.last:
                optimizer.step()
                optimizer.zero_grad()
    else:
        step = accumulating(steps=3)(lambda model, optimizer, x: mean_loss(model, x))
        for x in step.over(data) if how.endswith("over") else data:
            step(mine, optimizer, x)
    for buffer in one.buffers():  # which DDP makes equal in its next forward, and gradsync when the window closes
        dist.broadcast(buffer, 0)
    for (name, a), b in zip(one.state_dict().items(), two.state_dict().values(), strict=True):
        assert torch.equal(a, b), f"{name} differs by {(a - b).abs().max()}"


@pytest.mark.parametrize("how", ["bare", "bare over", "ddp", "ddp over", "bare sync_every", "ddp sync_every"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_whole_windows_are_bitwise_the_loop_by_hand(ranks, how, dtype):
    for config in ("default",) if how.startswith("bare") else ("default", "find_unused", "views", "buckets"):
        for make in ("small", "buffers"):
            ranks(2).run(bitwise, config, make, dtype, how)
    ranks(3).run(bitwise, "default", "small", dtype, how)
