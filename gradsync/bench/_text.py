"""Numbers, columns and names as text."""

from collections.abc import Callable, Iterable, Sequence

from gradsync.bench._rows import Row
from gradsync.bench._suggest import Suggestion


def place(row: Row | Suggestion) -> str:
    """Name the row, with its link if that was given a rate."""
    return f"{row.place}, {row.link}" if row.link else row.place


def scale(seconds: Iterable[float]) -> tuple[Callable[[float], str], str]:
    """Return a function that writes seconds of about this size, and its unit."""
    if min(seconds) < 0.02:
        return milliseconds, "ms"
    return (lambda x: f"{x:.3f}"), "s"


def milliseconds(seconds: float) -> str:
    """Write seconds as milliseconds."""
    return f"{1000 * seconds:.2f}"


def megabytes(num_bytes: float) -> str:
    """Write bytes as megabytes, of a million."""
    return f"{num_bytes / 1e6:.1f} MB"


def grid(lines: Sequence[Sequence[str]]) -> str:
    """Align the columns; the first to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(
            [line[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True))]
        )
        for line in lines
    )
