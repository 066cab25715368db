"""How often a call makes the host wait for its device: exact counts, for each engine.

The host must not wait for a backward. So a held micro-batch waits for nothing, and neither does a boundary of plain calls;
where ranks exchange a table, in `.over` and with LossSum, a boundary waits once, for that alone. The device is less than
two micro-batches behind the host: as a forward begins, it has come to where it was queued.

What is one wait more: `skip=`, `nonfinite=`, torch's own under a GradScaler; and, on a rank that has not used a parameter
in the window, the question whether another has, where the engine asks it (as DDP itself does under find_unused).
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

STEPS, WINDOWS = 3, 2  # of which the first is not counted: engines are made in it

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


def replicate(model):
    from torch.distributed._composable.replicate import replicate

    return replicate(model)


def replicate_fsdp(model):
    from torch.distributed._composable.replicate_with_fsdp import replicate
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cuda", (2,))
    for layer in (model[0], model[2], model):
        replicate(layer, mesh=mesh)
    return model


ENGINES: dict[str, Callable] = {
    "one rank": lambda model: model,
    "bare": lambda model: model,
    "DDP": plain_ddp,
    "DDP, unused": functools.partial(plain_ddp, find_unused_parameters=True),
    "DDP, static": functools.partial(plain_ddp, static_graph=True),
    "replicate": replicate,
    "replicate (FSDP)": replicate_fsdp,
    "FSDP1": fsdp1,
    "FSDP2": fsdp2,
    "HSDP": hsdp,
}


# -- what is asked of each ----------------------------------------------------------------------------------------------


class Unused(torch.nn.Sequential):
    """The small model, a buffer that changes in each forward, and a parameter that nothing uses."""

    def __init__(self) -> None:
        super().__init__(*small_model())
        self.unused = torch.nn.Parameter(torch.ones(2))
        self.register_buffer("seen", torch.zeros(2))

    def forward(self, inputs):
        self.seen.add_(1)
        return super().forward(inputs)


@dataclass(frozen=True)
class Scenario:
    """A loop, and how often its boundary waits, on several ranks and on one. Held micro-batches never wait."""

    name: str
    boundary: int
    alone: int = 0
    options: dict = field(default_factory=dict)
    loop: str = "plain"
    loss: str = "mean"
    engines: tuple[str, ...] = ()  # all, if none is named
    model: Callable = small_model


KIN = ("DDP, unused", "DDP, static", "replicate", "replicate (FSDP)", "HSDP")  # of others: with fewer scenarios
WITH_KIN = ("plain", "over, unknown", "LossSum, over", "nonfinite, over", "skip, over", "GradScaler", "sync_every, known")
FINDING_UNUSED = ("bare", "DDP, unused", "replicate (FSDP)", "FSDP2", "HSDP")
PLAIN_UNUSED = ("one rank", "FSDP1")

SCENARIOS = [
    Scenario("plain", 0),
    Scenario("clip_norm", 0, options={"clip_norm": 1.0}),
    Scenario("sync each", 0, options={"sync": "each"}),
    Scenario("sync shard", 0, options={"sync": "shard"}, engines=("HSDP",)),
    Scenario("over, known", 1, loop="known", options={"clip_norm": 1.0}),
    Scenario("over, unknown", 1, loop="unknown"),
    Scenario("over, unknown, sync each", 1, loop="unknown", options={"sync": "each"}),
    Scenario("steps as a function", 1, options={"steps": lambda window: STEPS}),
    Scenario("LossSum", 1, loss="sum"),
    Scenario("LossSum, count on the device", 1, 1, loss="sum on the device"),
    Scenario("LossSum, over", 1, 1, loop="known", loss="sum on the device"),
    Scenario("nonfinite", 1, 1, {"nonfinite": "skip"}),
    Scenario("nonfinite, over", 2, 1, {"nonfinite": "skip"}, loop="known"),
    Scenario("skip", 2, options={"skip": ValueError}),
    Scenario("skip, over", 2, options={"skip": ValueError}, loop="unknown"),
    Scenario("GradScaler", 0, loss="scaled"),  # and torch's own, as counted in `scaled_by_hand`
    Scenario("GradScaler, over", 1, loss="scaled", loop="unknown", options={"clip_norm": 1.0}),
    Scenario("an unused parameter", 0, engines=PLAIN_UNUSED, model=Unused),
    Scenario("an unused parameter that is asked for", 1, engines=FINDING_UNUSED, model=Unused),
    Scenario("fit", 0, options={"fit": True}, engines=("one rank", "bare", "DDP", "replicate")),
    Scenario("overlap", 0, options={"overlap": 1}, engines=("one rank", "bare", "DDP")),
    Scenario("overlap, over", 1, options={"overlap": 1}, loop="known", engines=("bare", "DDP")),
    Scenario("compress", 0, options={"compress": "bf16"}, engines=("one rank", "bare")),
    Scenario("sync_every", 0, loop="iterator"),
    Scenario("sync_every, count on the device", 1, 1, loop="iterator", loss="sum on the device"),
    Scenario("sync_every, known", 1, loop="iterator, known"),
    Scenario("sync_every, unknown", 1, loop="iterator, unknown"),
]


def play(engine: str, scenario: Scenario) -> dict[str, list[Counter]]:
    """The waits of each call, and of drawing each item, by what the call was."""
    model = ENGINES[engine](scenario.model().to("cuda"))
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    rank = dist.get_rank() if dist.is_initialized() else 0
    items = [tuple(tensor.to("cuda") for tensor in batch(rank, number)) for number in range(STEPS * WINDOWS)]
    loop = iterator if scenario.loop.startswith("iterator") else decorated
    calls = loop(engine, scenario, model, optimizer, items)
    found: dict[str, list[Counter]] = {"held": [], "boundary": []}
    for number in range(STEPS * WINDOWS):
        with waits() as waited:
            next(calls)
        if number >= STEPS:
            found["boundary" if number % STEPS == STEPS - 1 else "held"].append(waited)
    assert next(calls, None) == WINDOWS, "updates"
    return found


def loss_of(scenario: Scenario, model, item):
    """The loss of a micro-batch, and what it is a sum over."""
    from tests.device.fake import catch_up

    catch_up()
    inputs, targets = item
    loss = F.mse_loss(model(inputs), targets)
    if scenario.loss == "sum":
        return loss * len(inputs), len(inputs)
    if scenario.loss == "sum on the device":
        return loss * len(inputs), (targets > -100).sum()
    return loss, None


def decorated(engine: str, scenario: Scenario, model, optimizer, items) -> Iterator[int | None]:
    """Each item's draw and call, and at the end how many updates there were."""
    import gradsync

    extra = [_scaler(engine)] if scenario.loss == "scaled" else []

    @gradsync.accumulating(**{"steps": STEPS, **scenario.options})
    def step(model, optimizer, item, *extra):
        loss, count = loss_of(scenario, model, item)
        return loss if count is None else gradsync.LossSum(loss, count)

    loop = {"plain": lambda: items, "known": lambda: step.over(items), "unknown": lambda: step.over(iter(items))}
    for item in loop[scenario.loop]():
        step(model, optimizer, item, *extra)
        yield
    step.settle()
    yield step.progress.updates


def iterator(engine: str, scenario: Scenario, model, optimizer, items) -> Iterator[int | None]:
    import gradsync

    loops = {
        "iterator": lambda: zip(gradsync.sync_every(model, STEPS), items),
        "iterator, known": lambda: gradsync.sync_every(model, STEPS, items),
        "iterator, unknown": lambda: gradsync.sync_every(model, STEPS, iter(items)),
    }
    updates = 0
    for step, item in loops[scenario.loop]():
        loss, count = loss_of(scenario, model, item)
        step.backward(loss, count=count)
        if step.last:
            optimizer.step()
            optimizer.zero_grad()
            updates += 1
        yield
    yield updates


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
            for scenario in scenarios_of(engine):
                last = scenario.name
                of_engine[last] = play(engine, scenario)
        except Exception:
            of_engine[last] = traceback.format_exc()
            break
    return results


@functools.cache
def results_on(ranks: int) -> list[dict[str, dict[str, object]]]:
    return run_on_device(play_all, [engine for engine in ENGINES if (engine == "one rank") == (ranks == 1)], ranks=ranks)


def scenarios_of(engine: str) -> list[Scenario]:
    fewer = engine in KIN
    return [
        one for one in SCENARIOS if engine in one.engines or not (one.engines or (fewer and one.name not in WITH_KIN))
    ]


BY_HAND = "torch's own under a GradScaler"


@pytest.mark.parametrize("engine", ENGINES)
def test_the_host_waits_so_often(engine):
    alone = engine == "one rank"
    for results in results_on(1 if alone else 2):
        result, wrong = results[engine], []
        for scenario in scenarios_of(engine):
            found = result.get(scenario.name, "a scenario before it failed")
            assert isinstance(found, dict), f"{scenario.name}: {found}"
            due = scenario.alone if alone else scenario.boundary
            due += result[BY_HAND] if scenario.loss == "scaled" else 0
            for kind, expected in (("held", 0), ("boundary", due)):
                for counter in found[kind]:
                    if counter.total() != expected:
                        wrong.append(f"{scenario.name}, {kind}, {expected} are right: {dict(counter)}")
        assert not wrong, "\n".join(wrong)
