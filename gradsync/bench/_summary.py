"""Turns times into facts. `--json` prints them; the table and the pictures show them."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median, quantiles

from gradsync.bench import _window_cost
from gradsync.bench._records import Measured, Options, Place, Sample
from gradsync.bench._rows import Column, Curve, Row
from gradsync.bench._suggest import Suggestion, suggest


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
    optimizer: str
    missing: dict[str, str]
    rows: list[Row]
    curves: list[Curve]
    advice: list[Suggestion]


def summarise(options: Options, command: str, groups: Sequence[Measured]) -> Summary:
    """Put together what groups of ranks have measured, each in its place."""
    first = groups[0]
    rows = [_row(group, sample) for group in groups for sample in group.samples]
    curves = [curve for group in groups for curve in _curves(group.place, rows)] if len(options.steps) > 1 else []
    advice = [suggest(_at(group.place, rows), options.batch) for group in groups]
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
        optimizer=first.optimizer,
        missing={name: why for group in groups for name, why in group.missing.items()},
        rows=rows,
        curves=curves,
        advice=advice,
    )


def _row(group: Measured, sample: Sample) -> Row:
    place, seconds = group.place, dict(sample.seconds)
    forwards, links = seconds.pop("forward"), seconds.pop("link")
    compute, forward, link = median(seconds["compute"]), median(forwards), median(links)
    limit = _window_cost.limit(compute=compute, forward=forward, link=link, steps=sample.steps)
    no_sync = median(seconds["no_sync"])

    def column(name: str, times: list[float]) -> Column:
        low, middle, high = quantiles(times, n=4, method="inclusive")
        return Column(
            seconds=times,
            median=middle,
            quartiles=(low, high),
            ratio=middle / no_sync,
            over_limit=middle - limit,
            over_compute=middle - compute,
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
        forward=forward,
        link_seconds=link,
        link_bits_per_second=_window_cost.num_link_bits(group.gradient_bytes, place.ranks) / link,
        limit=limit,
        overlap=sample.overlap,
        ways={name: column(name, times) for name, times in seconds.items()},
    )


def _at(place: Place, rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if (row.place, row.link) == (place.name, place.link)]


def _curves(place: Place, rows: Sequence[Row]) -> list[Curve]:
    here = _at(place, rows)
    curves = []
    for way in here[0].ways:
        seconds = {row.steps: row.ways[way].median / row.steps for row in here}
        curves.append(Curve(place.name, place.link, way, *_window_cost.least_squares(seconds)))
    return curves
