"""What must be in order on a device, and on whose memory: streams by vector clocks, and a group without the CPU."""

from __future__ import annotations

import warnings

import pytest
import torch

from tests.device import run_on_device
from tests.device.test_device import RATE


def fsdp1_hybrid() -> dict[str, list[str]]:
    """Races in three ways to an update of FSDP1 HYBRID_SHARD: torch's own, a window, and a flush of a held window."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

    import gradsync
    from tests.device.fake import races

    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    model = FullyShardedDataParallel(
        torch.nn.Linear(8, 8).to("cuda"),
        device_id=0,
        use_orig_params=True,
        sharding_strategy=ShardingStrategy.HYBRID_SHARD,
        device_mesh=init_device_mesh("cuda", (2, 2), mesh_dim_names=("replicate", "shard")),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    inputs = torch.randn(4, 8, device="cuda")

    @gradsync.accumulating(steps=3)
    def step(model, optimizer, inputs):
        return model(inputs).square().mean()

    def by_hand():
        model(inputs).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    def window():
        for _ in range(3):
            step(model, optimizer, inputs)

    def flush():
        step(model, optimizer, inputs)
        step.flush()

    found = {}
    for way in (by_hand, window, flush):
        races()
        way()
        found[way.__name__] = races()
    return found


@pytest.fixture(scope="module")
def hybrid() -> list[dict[str, list[str]]]:
    return run_on_device(fsdp1_hybrid, ranks=4)


@pytest.mark.parametrize("way", ["by_hand", "window", "flush"])
def test_fsdp1_hybrid_updates_after_the_all_reduce_between_replicas(way, hybrid):
    """The reduction of a held window ends on another stream than torch's backward leaves it on."""
    for found in hybrid:
        assert found[way] == []


def offloaded(loop: str) -> int:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

    import gradsync

    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 1))
    mesh = init_device_mesh("cuda", (2,))
    for module in (*model, model):
        fully_shard(module, mesh=mesh, offload_policy=CPUOffloadPolicy(pin_memory=True))
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)

    @gradsync.accumulating(steps=2)
    def step(model, optimizer, inputs):
        return model(inputs).square().mean()

    items = [torch.randn(4, 8, device="cuda")] * 4
    loops = {"plain": lambda: items, "known": lambda: step.over(items), "unknown": lambda: step.over(iter(items))}
    for item in loops[loop]():
        step(model, optimizer, item)
    return step.progress.updates


LOOPS = ["plain", "known", "unknown"]


def offloaded_in_all() -> dict[str, object]:
    """What each loop gave; none is tried after one that failed, for ranks may be out of step."""
    found: dict[str, object] = {}
    for loop in LOOPS:
        try:
            found[loop] = offloaded(loop)
        except RuntimeError as error:
            found[loop] = str(error)
            break
    return found


@pytest.fixture(scope="module")
def on_the_host() -> list[dict[str, object]]:
    return run_on_device(offloaded_in_all)


@pytest.mark.parametrize("loop", LOOPS)
def test_offloaded_parameters_on_a_group_that_takes_no_tensors_of_the_cpu(loop, on_the_host):
    """A table travels on the group's device, which is not that of the parameters."""
    assert [found.get(loop) for found in on_the_host] == [2, 2]
