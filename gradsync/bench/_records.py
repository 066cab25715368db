"""Plain values that pass between the command, its ranks and the report. None of them needs torch."""

import json
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class Options:
    """What a rank must know of the command line."""

    model: str
    factory: str | None
    optimizer: str | None
    """None if the command line names none."""
    sizes: dict[str, int]
    batch: int
    steps: tuple[int, ...]
    ways: tuple[str, ...]
    threads: int
    rounds: int
    seconds: float
    limit: float


@dataclass(frozen=True)
class Place:
    """Where a group of ranks runs: one row of the table."""

    name: str
    hosts: int
    ranks: int
    link: str | None = None
    """The rate that the link between emulated hosts was given."""
    interface: str | None = None
    """The host's end of that link: only the bench uses it, so its bytes can be counted."""


@dataclass(frozen=True)
class Sample:
    """The times of one place with one window length."""

    steps: int
    seconds: dict[str, list[float]]
    """The slowest rank's time in each round. By a way's name: of one window. `forward`: of one micro-batch's forward.
    `link`: of one all_reduce with as many bytes as the gradients have."""
    sent: dict[str, float]
    """Bytes that left a host in one window, by way; empty if they cannot be counted."""
    apart: list[str]
    """Ways whose ranks ended with different parameters: they did not synchronise, so their times mean nothing."""
    overlap: dict[str, int] = field(default_factory=dict)
    """For each way that overlaps: how many micro-batches ran while gradients travelled."""


@dataclass(frozen=True)
class Measured:
    """All that one group of ranks has measured."""

    place: Place
    torch: str
    backend: str
    device: str
    parameters: int
    gradient_bytes: int
    optimizer: str
    """The name of its class."""
    missing: dict[str, str]
    """The ways that are left out, and what some rank's machine lacks for each."""
    samples: list[Sample]


def dump_task(options: Options, place: Place) -> str:
    """Write the task of a rank."""
    return json.dumps({"options": asdict(options), "place": asdict(place)})


def load_task(text: str) -> tuple[Options, Place]:
    """Undo `dump_task`."""
    record: dict[str, dict[str, Any]] = json.loads(text)
    options = record["options"]
    options.update(steps=tuple(options["steps"]), ways=tuple(options["ways"]))
    return Options(**options), Place(**record["place"])


def dump_measured(measured: Measured) -> str:
    """Write the result of a rank."""
    return json.dumps(asdict(measured))


def load_measured(text: str) -> Measured:
    """Undo `dump_measured`."""
    record: dict[str, Any] = json.loads(text)
    record["place"] = Place(**record["place"])
    record["samples"] = [Sample(**sample) for sample in record["samples"]]
    return Measured(**record)
