"""What was found in one place with one window length: the rows of the table, and the curves through them."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Column:
    """One way in one row, in seconds per optimizer step."""

    seconds: list[float]
    median: float
    quartiles: tuple[float, float]
    ratio: float
    """To `no_sync` by hand. Like the next two it is of the medians, so that it follows from what is printed."""
    over_limit: float
    """Seconds beyond the limit of exact ways; negative for a remedy that beats it, or by noise."""
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
