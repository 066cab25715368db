"""What to advise in one place, as numbers, from its rows: how long windows should be, and which remedy to use.

`_advice.py` puts it into sentences.

It follows from medians and quartiles that the table shows. Window lengths that were measured are judged by their own
times; only for a longer window is anything estimated.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from gradsync.bench import _window_cost
from gradsync.bench._remedies import REMEDIES
from gradsync.bench._rows import Column, Row

PREFERRED = "accumulating", "sync_every", "no_sync"
"""Advice is about the first of these ways that was measured."""

AS_FAST = 1.03
"""Remedies that take at most this times the fastest one's time count as equally fast; the simplest is then best."""


@dataclass(frozen=True)
class Share:
    """The share of a window's time that synchronisation takes: all beyond computing alone."""

    steps: int
    seconds: float
    compute: float
    share: float
    quartiles: tuple[float, float]
    """The lowest and the highest share that the quartiles of both times allow."""
    baseline: float | None
    """The share if every backward synchronises; None if not measured, or in windows of 1, where it is the same."""
    effective_batch: int


@dataclass(frozen=True)
class Longer:
    """A window length whose share is under the target."""

    steps: int
    share: float
    effective_batch: int
    estimated: bool
    """Whether it is longer than all that were measured."""


@dataclass(frozen=True)
class Gain:
    """The best remedy for one window length, beside the way that advice is about."""

    steps: int
    way: str
    written: str
    price: str
    seconds: float
    instead_of: float
    ratio: float
    clear: bool
    """Whether the quartiles of the two lie apart."""


@dataclass(frozen=True)
class Suggestion:
    """What to do in one place."""

    place: str
    link: str | None
    way: str
    shares: list[Share]
    """By window length, the shortest first."""
    enough: Longer | None
    """None if the shares rise with the window, which can only be noise."""
    gains: list[Gain]
    """One for each window length at which a remedy was measured."""


def suggest(rows: Sequence[Row], batch: int) -> Suggestion:
    """Make the advice from the rows of one place, which differ in their window length."""
    rows = sorted(rows, key=lambda row: row.steps)
    way = next(name for name in PREFERRED if name in rows[0].ways)
    shares = [_share(row, way, batch) for row in rows]
    gains = [_gain(row, way) for row in rows if _remedies(row)]
    return Suggestion(rows[0].place, rows[0].link, way, shares, _enough(shares), gains)


def _share(row: Row, way: str, batch: int) -> Share:
    mine, compute, baseline = row.ways[way], row.ways["compute"], row.ways.get("baseline")
    return Share(
        steps=row.steps,
        seconds=mine.median,
        compute=compute.median,
        share=_window_cost.share(mine.median - compute.median, mine.median),
        quartiles=(
            _window_cost.share(mine.quartiles[0] - compute.quartiles[1], mine.quartiles[0]),
            _window_cost.share(mine.quartiles[1] - compute.quartiles[0], mine.quartiles[1]),
        ),
        baseline=_window_cost.share(baseline.median - compute.median, baseline.median)
        if baseline and row.steps > 1
        else None,
        effective_batch=row.steps * batch * row.ranks,
    )


def _enough(shares: Sequence[Share]) -> Longer | None:
    """Find the shortest measured length under the target, or estimate one from the longest."""
    under = [share.share < _window_cost.TARGET for share in shares]
    if under != sorted(under):
        return None
    if under[-1]:
        first = shares[under.index(True)]
        return Longer(first.steps, first.share, first.effective_batch, estimated=False)
    last = shares[-1]
    sync, micro_batch = last.seconds - last.compute, last.compute / last.steps
    steps = _window_cost.enough(sync, micro_batch)
    share = _window_cost.share(sync, steps * micro_batch + sync)
    return Longer(steps, share, last.effective_batch // last.steps * steps, estimated=True)


def _remedies(row: Row) -> dict[str, Column]:
    return {name: row.ways[name] for name in REMEDIES if name in row.ways and row.ways[name].synchronised}


def _gain(row: Row, way: str) -> Gain:
    remedies, instead_of = _remedies(row), row.ways[way]
    fastest = min(column.median for column in remedies.values())
    name, best = next((name, column) for name, column in remedies.items() if column.median <= AS_FAST * fastest)
    overlap = row.overlap.get(name, 0)
    return Gain(
        steps=row.steps,
        way=name,
        written=REMEDIES[name].written(row.steps, overlap),
        price=REMEDIES[name].told(overlap),
        seconds=best.median,
        instead_of=instead_of.median,
        ratio=best.median / instead_of.median,
        clear=best.quartiles[1] < instead_of.quartiles[0],
    )
