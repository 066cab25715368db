"""What was found in one place with one window length: the rows of the table, and the curves through them."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Column:
    """One way in one row, in seconds per optimizer step."""

    seconds: list[float]
    median: float
    quartiles: tuple[float, float]
    ratio: float
    """To `no_sync` by hand. This and the next two are computed from the medians, which are printed."""
    over_limit: float
    """Seconds beyond the limit of exact ways; negative if a remedy is faster than that, or by noise."""
    over_compute: float
    """Seconds beyond computing alone."""
    bytes_sent: float | None
    """By a host in one window, counted on its interface; None if other traffic is counted there, too."""
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
    """One all_reduce with as many bytes as the gradients have, and nothing beside it."""
    link_bits_per_second: float
    limit: float
    """Of exact ways, from the medians of `compute`, `forward` and the link."""
    overlap: dict[str, int]
    """For each way that overlaps: how many micro-batches ran while gradients travelled."""
    ways: dict[str, Column]


@dataclass(frozen=True)
class Curve:
    """c + s/N of one way: seconds a micro-batch over the window's length."""

    place: str
    link: str | None
    way: str
    micro_batch: float
    window: float
