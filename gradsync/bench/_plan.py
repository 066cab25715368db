"""From the command line to a plan: what to measure, and in which places."""

import argparse
import os

from gradsync.bench import _hosts, _models, _plot
from gradsync.bench._errors import BenchError
from gradsync.bench._records import Options, Place
from gradsync.bench._remedies import REMEDIES
from gradsync.bench._ways import ALWAYS, WAYS

SWEEP = "baseline", "no_sync", "accumulating", "sync_every", *REMEDIES, "compute"
"""The default ways of a sweep over window lengths: its long windows take time, and other libraries are in the table."""


def under_torchrun() -> bool:
    """Whether this process is a rank that something else has started."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def plan(given: argparse.Namespace) -> tuple[Options, list[Place]]:
    """Decide what to measure in which places; raise a BenchError if the arguments do not go together."""
    if given.factory and given.model:
        raise BenchError("--factory brings its own model, so --model has no meaning beside it; leave one of them out.")
    model = given.model or "mlp"
    defaults = {"batch": 16} if given.factory else _models.SIZES[model]
    asked = {
        s: getattr(given, s) for s in ("width", "depth", "heads", "length", "vocab") if getattr(given, s) is not None
    }
    foreign = [size for size in asked if size not in defaults]
    if foreign:
        owner = "a factory sets its model's sizes itself" if given.factory else f"{model} has {', '.join(defaults)}"
        raise BenchError(f"--{foreign[0]} is no size of this model: {owner}.")
    sizes = {size: default for size, default in {**defaults, **asked}.items() if size != "batch"}
    _models.check(model, given.factory, sizes)
    if given.plot is not None:
        _plot.check(given.plot)
    every = SWEEP if len(given.steps) > 1 else tuple(name for name in WAYS if name != "accumulating_ddp")
    ways = given.ways or every
    options = Options(
        model=model,
        factory=given.factory,
        optimizer=given.optimizer,
        sizes=sizes,
        batch=given.batch or defaults["batch"],
        steps=tuple(sorted(set(given.steps))),
        ways=tuple(name for name in WAYS if name in ways or name in ALWAYS),
        threads=given.threads,
        rounds=given.rounds,
        seconds=given.seconds,
        limit=given.limit,
    )
    return options, _places(given)


def _places(given: argparse.Namespace) -> list[Place]:
    if under_torchrun():
        return [_place_of_torchrun(given)]
    if given.hosts is None:
        if given.link or given.links:
            raise BenchError("--link and --links give emulated hosts their rate; they need --hosts 2.")
        ranks = given.ranks or 2
        if ranks < 2:
            raise BenchError("Synchronisation needs two ranks at least; --ranks came as 1.")
        return [Place("single node", 1, ranks)]
    if given.link and given.links:
        raise BenchError("--link gives one rate and --links several; leave one of them out.")
    links = given.links or (given.link or "1gbit",)
    for link in links:
        _hosts.rate(link)
    _hosts.check()
    ranks = 2 * (given.ranks or 1)
    emulated = [Place("several nodes", 2, ranks, link, _hosts.INTERFACE) for link in links]
    return [*emulated, Place("single node", 1, ranks)]


def _place_of_torchrun(given: argparse.Namespace) -> Place:
    for name in ("ranks", "hosts", "link", "links"):
        if getattr(given, name):
            raise BenchError(
                f"--{name} is for a bench that starts its own ranks; torchrun has started these. Leave it out."
            )
    ranks = int(os.environ["WORLD_SIZE"])
    if ranks < 2:
        raise BenchError("Synchronisation needs two ranks at least; torchrun has started 1.")
    hosts = ranks // int(os.environ.get("LOCAL_WORLD_SIZE", ranks))
    return Place("several nodes" if hosts > 1 else "single node", hosts, ranks)
