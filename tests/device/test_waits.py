"""How often a call makes the host wait for its device: exact counts, for each engine.

The host must not wait for a backward. So a held micro-batch waits for nothing, and neither does a boundary of plain calls;
where ranks exchange a table, in `.over` and with LossSum, a boundary may wait once, for that alone. The device is less than
two micro-batches behind the host: as a forward begins, it has come to where it was queued.
"""

from __future__ import annotations

import functools
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from tests.device import run_on_device, waits
from tests.device.test_device import RATE, batch, small_model

STEPS, WINDOWS = 4, 3  # of which the first is not counted: engines are made in it

# -- the engines ------------------------------------------------------------------------------------------------------


def plain_ddp(model, **options):
    return torch.nn.parallel.DistributedDataParallel(model, device_ids=[0], **options)


def fsdp1(model):
    from torch.distributed.fsdp import FullyShardedDataParallel

    return FullyShardedDataParallel(model, device_id=0, use_orig_params=True, limit_all_gathers=False)  # which waits by itself


def fsdp2(model, **mesh):
    from torch.distributed.fsdp import fully_shard

    for layer in (model[0], model[2], model):
        fully_shard(layer, **mesh)
    return model


def hsdp(model):
    from torch.distributed.device_mesh import init_device_mesh

    return fsdp2(model, mesh=init_device_mesh("cuda", (2, 1), mesh_dim_names=("replicate", "shard")))


ENGINES: dict[str, Callable] = {
    "one rank": lambda model: model,
    "bare": lambda model: model,
    "DDP": plain_ddp,
    "DDP, unused": functools.partial(plain_ddp, find_unused_parameters=True),
    "DDP, static": functools.partial(plain_ddp, static_graph=True),
    "FSDP1": fsdp1,
    "FSDP2": fsdp2,
    "HSDP": hsdp,
}


# -- what is asked of each ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Scenario:
    """A loop, and how often its calls may wait: the others never, a boundary at most so often."""

    name: str
    boundary: int
    options: dict = field(default_factory=dict)
    loop: str = "plain"
    loss: str = "mean"


SCENARIOS = [
    Scenario("plain", 0),
    Scenario("clip_norm", 0, {"clip_norm": 1.0}),
    Scenario("sync each", 0, {"sync": "each"}),
    Scenario("over, known", 1, loop="known"),
    Scenario("over, unknown", 1, loop="unknown"),
    Scenario("LossSum", 1, loss="sum"),
    Scenario("LossSum, count on the device", 1, loss="sum on the device"),
    Scenario("LossSum, over", 1, loop="known", loss="sum on the device"),
    Scenario("nonfinite", 1, {"nonfinite": "skip"}),
    Scenario("nonfinite, over", 2, {"nonfinite": "skip"}, loop="known"),
    Scenario("skip, over", 2, {"skip": ValueError}, loop="known"),
    Scenario("GradScaler", 0, loss="scaled"),  # and torch's own, as counted in `scaled_by_hand`
]


def play(engine: str, scenario: Scenario) -> dict[str, list[Counter]]:
    """The waits of each call, and of drawing each item, by what the call was."""
    import gradsync
    from tests.device.fake import catch_up

    model = ENGINES[engine](small_model().to("cuda"))
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    extra = [_scaler(engine)] if scenario.loss == "scaled" else []

    @gradsync.accumulating(steps=STEPS, **scenario.options)
    def step(model, optimizer, item, *extra):
        catch_up()
        inputs, targets = item
        loss = F.mse_loss(model(inputs), targets)
        if scenario.loss == "sum":
            return gradsync.LossSum(loss * len(inputs), len(inputs))
        if scenario.loss == "sum on the device":
            return gradsync.LossSum(loss * len(inputs), (targets > -100).sum())
        return loss

    rank = dist.get_rank() if dist.is_initialized() else 0
    items = [tuple(tensor.to("cuda") for tensor in batch(rank, number)) for number in range(STEPS * WINDOWS)]
    loop = {"plain": lambda: items, "known": lambda: step.over(items), "unknown": lambda: step.over(iter(items))}
    found: dict[str, list[Counter]] = {"held": [], "boundary": []}
    drawing = iter(loop[scenario.loop]())
    for number in range(STEPS * WINDOWS):
        with waits() as drawn:
            item = next(drawing)
        with waits() as called:
            step(model, optimizer, item, *extra)
        if number >= STEPS:
            kind = "boundary" if number % STEPS == STEPS - 1 else "held"
            found[kind].append(drawn + called)
    for _ in drawing:
        raise AssertionError("no item is left")
    assert step.progress.updates == WINDOWS
    return found


def scaled_by_hand(engine: str) -> int:
    """How often torch itself waits in an update under a GradScaler."""
    model = ENGINES[engine](small_model().to("cuda"))
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    scaler = _scaler(engine)
    for _ in range(2):
        scaler.scale(model(torch.ones(4, 8, device="cuda")).square().mean()).backward()
        with waits() as found:
            scaler.step(optimizer)
            scaler.update()
        optimizer.zero_grad()
    return found.total()


def _scaler(engine: str):
    if engine == "FSDP1":
        from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

        return ShardedGradScaler("cuda", init_scale=1024.0)
    return torch.amp.GradScaler("cuda", init_scale=1024.0)


def play_all(engines: list[str]) -> dict[str, dict[str, object]]:
    """By engine and scenario: the waits, or a traceback; after a failure nothing is tried, for ranks may be out of step."""
    warnings.simplefilter("ignore")
    results: dict[str, dict[str, object]] = {engine: {} for engine in engines}
    for engine, of_engine in results.items():
        last = BY_HAND
        try:
            of_engine[last] = scaled_by_hand(engine)
            for scenario in SCENARIOS:
                last = scenario.name
                of_engine[last] = play(engine, scenario)
        except Exception:
            of_engine[last] = traceback.format_exc()
            break
    return results


@functools.cache
def results_on(ranks: int) -> list[dict[str, dict[str, object]]]:
    return run_on_device(play_all, [engine for engine in ENGINES if (engine == "one rank") == (ranks == 1)], ranks=ranks)


BY_HAND = "torch's own under a GradScaler"
CELLS = [
    pytest.param(engine, scenario, id=f"{engine}-{scenario.name}") for engine in ENGINES for scenario in SCENARIOS
]


@pytest.mark.parametrize(("engine", "scenario"), CELLS)
def test_the_host_waits_so_often(engine, scenario):
    for results in results_on(1 if engine == "one rank" else 2):
        result = results[engine]
        found = result.get(scenario.name, "a scenario before it failed")
        allowed = scenario.boundary + (result[BY_HAND] if scenario.loss == "scaled" else 0)
        assert isinstance(found, dict), found
        for counter in found["held"]:
            assert counter.total() == 0, f"a held micro-batch: {dict(counter)}"
        for counter in found["boundary"]:
            assert counter.total() <= allowed, f"a boundary: {dict(counter)}"
