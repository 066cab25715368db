"""Times all ways side by side on this rank: in each round, each way in turn, so that drift affects all alike."""

import math
import random
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch
import torch.distributed as dist

from gradsync.bench import _window_cost
from gradsync.bench._models import Workload, build
from gradsync.bench._records import Options, Place, Sample
from gradsync.bench._remedies import REMEDIES
from gradsync.bench._task import Loader, Task, Window
from gradsync.bench._ways import WAYS

NUM_BATCHES = 4
"""Micro-batches that are made in advance, because making them is not measured."""

MIN_ROUNDS = 3
VISIT_SECONDS = 0.25
"""A visit repeats short windows for about this long, if there is time: the jitter of its start then matters little."""


class Lane(NamedTuple):
    """Something that is timed, and how often a visit repeats it."""

    window: Window
    repeats: int


class Visit(NamedTuple):
    """What one visit to a lane has cost, per repetition."""

    seconds: float
    sent: float


def measure(options: Options, place: Place, steps: int, device: torch.device, say: Callable[[str], None]) -> Sample:
    """Build every way with windows of `steps`, warm up, and run rounds until all are done or the time is used up."""
    tasks = {name: _task(options, steps, device) for name in options.ways}
    windows = {
        "compute": WAYS["compute"].build(tasks["compute"]),
        "forward": _forward(tasks["compute"]),
        "link": _link(tasks["compute"]),
    }
    say("finding out how much to overlap")
    micro_batch, link = (_typical(windows[name], device) for name in ("compute", "link"))
    overlap = {
        name: _window_cost.num_hiding(link * remedy.bytes_sent, micro_batch / steps, steps)
        for name, remedy in REMEDIES.items()
        if remedy.overlaps and name in tasks
    }
    for name, task in tasks.items():
        if name not in windows:
            windows[name] = WAYS[name].build(task._replace(overlap=overlap.get(name, 0)))
    lanes = {}
    visit_seconds = min(VISIT_SECONDS, options.seconds / len(options.steps) / options.rounds / len(windows))
    for name in (*tasks, "forward", "link"):
        say(f"warming up {name}")
        lanes[name] = _warm_up(windows[name], visit_seconds, device)
    visits = _rounds(lanes, options, place, device, say)
    return Sample(
        steps,
        {name: [each.seconds for each in visits[name]] for name in lanes},
        {name: median(each.sent for each in visits[name]) for name in options.ways if place.interface},
        [name for name in tasks if name != "compute" and _differs(tasks[name].workload.model)],
        overlap,
    )


def _rounds(
    lanes: dict[str, Lane], options: Options, place: Place, device: torch.device, say: Callable[[str], None]
) -> dict[str, list[Visit]]:
    order, shuffle = list(lanes), random.Random(0)  # noqa: S311 - the same order on every rank; nothing secret
    visits: dict[str, list[Visit]] = {name: [] for name in lanes}
    budget = options.seconds / len(options.steps)
    began = time.perf_counter()
    for done in range(1, options.rounds + 1):
        shuffle.shuffle(order)
        mine = [number for name in order for number in visit(lanes[name], device, place.interface)]
        # The slowest rank's times count, and its clock, so that all ranks stop after the same round.
        *slowest, spent = _slowest([*mine, time.perf_counter() - began], device)
        for name, took, num_bytes in zip(order, slowest[::2], slowest[1::2], strict=True):
            visits[name].append(Visit(took, num_bytes))
        say(f"round {done} of {options.rounds}, {spent:.0f} of at most {budget:.0f} s")
        if done >= MIN_ROUNDS and spent * (done + 1) / done > budget:
            break
    return visits


def num_gradient_bytes(workload: Workload) -> int:
    """Count the bytes of gradients in one synchronisation."""
    return sum(p.numel() * p.element_size() for p in workload.model.parameters() if p.requires_grad)


def num_bytes_sent(interface: str) -> int:
    """Read how many bytes have left through this network interface so far; 0 if the system does not count them."""
    table = Path("/proc/self/net/dev")
    for line in table.read_text().splitlines() if table.exists() else ():
        name, _, counters = line.partition(":")
        if name.strip() == interface:
            return int(counters.split()[8])
    return 0


def _task(options: Options, steps: int, device: torch.device) -> Task:
    workload = build(options, device)
    torch.manual_seed(1 + dist.get_rank())
    return Task(workload, Loader([workload.make_batch() for _ in range(NUM_BATCHES)]), steps, device)


def _forward(task: Task) -> Window:
    return Window(lambda: task.workload.compute_loss(task.workload.model, task.loader.batches[0]))


def _link(task: Task) -> Window:
    flat = torch.zeros(math.ceil(num_gradient_bytes(task.workload) / 4), device=task.device)

    return Window(lambda: dist.all_reduce(flat))


def _typical(window: Window, device: torch.device) -> float:
    """The seconds of a window without a warm-up; the same number on every rank."""
    return median(_slowest([visit(Lane(window, 1), device, None).seconds], device)[0] for _ in range(4))


def _warm_up(window: Window, visit_seconds: float, device: torch.device) -> Lane:
    visit(Lane(window, 1), device, None)  # the first window fills DDP's first buckets, the next one rebuilds them
    [seconds] = _slowest([visit(Lane(window, 1), device, None).seconds], device)
    return Lane(window, min(20, math.ceil(visit_seconds / seconds)))


def visit(lane: Lane, device: torch.device, interface: str | None) -> Visit:
    """Time a lane's repetitions, on all ranks together.

    If gradients travel past the end of a window, two windows run before the clock starts. The clock then starts and
    stops right after a landing, with another window's gradients on the link, like in a long training: as many windows
    land as leave. Nothing travels when the next lane begins.
    """
    _slowest([0.0], device)  # as a barrier: ranks start together
    for _ in range(0 if lane.window.settle is None else 2):
        lane.window.run()
    before = num_bytes_sent(interface) if interface else 0
    began = time.perf_counter()
    for _ in range(lane.repeats):
        lane.window.run()
    if device.type != "cpu":
        # Not the whole device: gradients that overlap travel on streams of their own, and no step has waited for them.
        torch.accelerator.current_stream(device).synchronize()
    took = time.perf_counter() - began
    sent = num_bytes_sent(interface) - before if interface else 0
    if lane.window.settle is not None:
        lane.window.settle()
    return Visit(took / lane.repeats, sent / lane.repeats)


def _slowest(values: list[float], device: torch.device) -> list[float]:
    tensor = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(tensor, dist.ReduceOp.MAX)
    return [float(value) for value in tensor]


def _differs(model: torch.nn.Module) -> bool:
    high = torch.cat([p.detach().flatten()[:64].float() for p in model.parameters() if p.requires_grad])
    low = high.clone()
    dist.all_reduce(high, dist.ReduceOp.MAX)
    dist.all_reduce(low, dist.ReduceOp.MIN)
    return not torch.allclose(high, low, rtol=0, atol=0, equal_nan=True)
