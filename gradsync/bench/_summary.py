"""From times to facts: the shape of `--json`, which the table and the pictures show."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median, quantiles

from gradsync.bench import _advice
from gradsync.bench._records import Measured, Options, Place, Sample

PREFERRED = "accumulating", "sync_every", "no_sync"
"""The way that advice is about: the first of these that was measured."""


@dataclass(frozen=True)
class Column:
    """One way in one row, in seconds per optimizer step."""

    seconds: list[float]
    median: float
    quartiles: tuple[float, float]
    ratio: float
    """To `no_sync` by hand. Like the next two the median over rounds of what each shows, so that drift cancels."""
    over_limit: float
    """Seconds beyond the physical limit. Noise, or a link that is no faster than a copy, can make it negative."""
    over_compute: float
    """Seconds beyond computing alone."""
    bytes_sent: float | None
    """By a host in one window, counted on its interface; None where that cannot be told from other traffic."""
    synchronised: bool | None
    """Whether the ranks' parameters ended equal; None without an engine."""


@dataclass(frozen=True)
class Row:
    """One place with one window length."""

    place: str
    link: str | None
    hosts: int
    ranks: int
    steps: int
    rounds: int
    forward: float
    link_seconds: float
    """One all_reduce of as many bytes as there are gradients, with nothing else going on."""
    link_bits_per_second: float
    limit: float
    ways: dict[str, Column]


@dataclass(frozen=True)
class Curve:
    """c + s/N of one way: seconds a micro-batch over the window's length."""

    place: str
    link: str | None
    way: str
    micro_batch: float
    window: float


@dataclass(frozen=True)
class Suggestion:
    """How long windows should be in one place."""

    place: str
    link: str | None
    way: str
    steps: int
    share: float
    baseline_share: float | None
    effective_batch: int
    enough_steps: int
    enough_share: float
    enough_effective_batch: int


@dataclass(frozen=True)
class Summary:
    """Everything a run found."""

    command: str
    model: str
    sizes: dict[str, int]
    parameters: int
    gradient_bytes: int
    batch: int
    threads: int
    torch: str
    backend: str
    device: str
    missing: list[str]
    rows: list[Row]
    curves: list[Curve]
    advice: list[Suggestion]


def summarise(options: Options, command: str, groups: Sequence[Measured]) -> Summary:
    """Put together what groups of ranks have measured, each in its place."""
    first = groups[0]
    rows = [_row(group, sample) for group in groups for sample in group.samples]
    curves = [curve for group in groups for curve in _curves(group.place, rows)] if len(options.steps) > 1 else []
    advice = [_suggestion(group.place, rows, curves, options.batch) for group in groups]
    return Summary(
        command=command,
        model=options.factory or options.model,
        sizes=options.sizes,
        parameters=first.parameters,
        gradient_bytes=first.gradient_bytes,
        batch=options.batch,
        threads=options.threads,
        torch=first.torch,
        backend=first.backend,
        device=first.device,
        missing=sorted({name for group in groups for name in group.missing}),
        rows=rows,
        curves=curves,
        advice=advice,
    )


def _row(group: Measured, sample: Sample) -> Row:
    place, seconds = group.place, dict(sample.seconds)
    forwards, links = seconds.pop("forward"), seconds.pop("link")
    limits = [
        _advice.limit(compute=compute, forward=forward, link=link, steps=sample.steps)
        for compute, forward, link in zip(seconds["compute"], forwards, links, strict=True)
    ]
    link = median(links)

    def column(name: str, times: list[float]) -> Column:
        low, middle, high = quantiles(times, n=4, method="inclusive")
        return Column(
            seconds=times,
            median=middle,
            quartiles=(low, high),
            ratio=median(a / b for a, b in zip(times, seconds["no_sync"], strict=True)),
            over_limit=median(a - b for a, b in zip(times, limits, strict=True)),
            over_compute=median(a - b for a, b in zip(times, seconds["compute"], strict=True)),
            bytes_sent=sample.sent.get(name),
            synchronised=None if name == "compute" else name not in sample.apart,
        )

    return Row(
        place=place.name,
        link=place.link,
        hosts=place.hosts,
        ranks=place.ranks,
        steps=sample.steps,
        rounds=len(seconds["compute"]),
        forward=median(forwards),
        link_seconds=link,
        link_bits_per_second=_advice.num_link_bits(group.gradient_bytes, place.ranks) / link,
        limit=median(limits),
        ways={name: column(name, times) for name, times in seconds.items()},
    )


def _at(place: Place, rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if (row.place, row.link) == (place.name, place.link)]


def _curves(place: Place, rows: Sequence[Row]) -> list[Curve]:
    here = _at(place, rows)
    return [
        Curve(place.name, place.link, way, *_advice.fit({row.steps: row.ways[way].median / row.steps for row in here}))
        for way in here[0].ways
    ]


def _suggestion(place: Place, rows: Sequence[Row], curves: Sequence[Curve], batch: int) -> Suggestion:
    row = _at(place, rows)[0]
    way = next(name for name in PREFERRED if name in row.ways)
    fitted = {
        c.way: _advice.Cost(c.micro_batch, c.window) for c in curves if (c.place, c.link) == (row.place, row.link)
    }
    if fitted and fitted[way].micro_batch > 0:
        # What a window costs once beyond computing alone: the optimizer's step is in both.
        cost, sync = fitted[way], fitted[way].window - fitted["compute"].window
    else:
        sync = row.ways[way].over_compute
        cost = _advice.Cost(row.ways["compute"].median / row.steps, sync)
    advice = _advice.advise(cost, sync, row.steps)
    baseline = row.ways.get("baseline")
    return Suggestion(
        place=row.place,
        link=row.link,
        way=way,
        steps=row.steps,
        share=advice.share,
        baseline_share=max(0.0, baseline.over_compute / baseline.median) if baseline else None,
        effective_batch=row.steps * batch * row.ranks,
        enough_steps=advice.steps,
        enough_share=advice.share_then,
        enough_effective_batch=advice.steps * batch * row.ranks,
    )
