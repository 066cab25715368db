"""What must be in order on a device, and on whose memory: streams by vector clocks, and a group without the CPU."""

from __future__ import annotations

import warnings

import pytest
import torch

from tests.device import run_on_device
from tests.device.test_device import RATE, in_turn
from tests.overlap.loop import Plan, simulate
from tests.overlap.test_truth import even, far


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


OVERLAPPED = [
    Plan(even(2, windows=3), 2, "capturable", 0.3),
    Plan(((3, 3), (3, 2), (1, 0)), 3, "fused", compress=True),
    Plan(((3, 3), (3, 3), (2, 2)), 1, "sgd", infinite=((1, 4),)),
]


def overlapped() -> list[tuple[list[list[torch.Tensor]], list[str]]]:
    """The parameters after each update of each plan, and the races."""
    from tests.device.fake import races
    from tests.overlap.decorated import Training

    found = []
    for plan in OVERLAPPED:
        training = Training(plan, "cuda")
        races()
        for index in training.step.over(range(sum(counts[training.rank] for counts in plan.counts))):
            training.step(index)
        found.append(([[one.cpu() for one in seen] for seen in training.seen], races()))
    return found


@pytest.fixture(scope="module")
def of_two() -> list[list]:
    return run_on_device(in_turn, offloaded_in_all, overlapped)


@pytest.fixture
def on_the_host(of_two) -> list[dict[str, object]]:
    return [found for found, _ in of_two]


@pytest.mark.parametrize("loop", LOOPS)
def test_offloaded_parameters_on_a_group_that_takes_no_tensors_of_the_cpu(loop, on_the_host):
    """A table travels on the group's device, which is not that of the parameters."""
    assert [found.get(loop) for found in on_the_host] == [2, 2]


def test_gradients_that_travel_are_in_order_with_all_that_uses_their_memory(of_two):
    """With overlap: window after window in the same memory, in bfloat16 too; updates are those of the simulation."""
    for _, found in of_two:
        for plan, (seen, races) in zip(OVERLAPPED, found, strict=True):
            assert races == []
            # A capturable step counts, and corrects its bias, in float32.
            assert far(seen, simulate(plan)) < (1e-5 if plan.optimizer == "capturable" else 1e-12)
