"""The findings as text: a table, how it stands with the limit, and what to do about it."""

from collections.abc import Callable, Iterable, Sequence

from gradsync.bench._advice import TARGET, Cost
from gradsync.bench._summary import Row, Suggestion, Summary
from gradsync.bench._ways import WAYS


def report(summary: Summary) -> str:
    """All of it, for a terminal."""
    sweep = len({row.steps for row in summary.rows}) > 1
    parts = [
        _heading(summary),
        _table(summary.rows),
        *([_per_micro_batch(summary)] if sweep else [_details(row) for row in summary.rows]),
        *_warnings(summary),
        *map(_advice, summary.advice),
    ]
    return "\n\n".join(parts)


def place(row: Row | Suggestion) -> str:
    """Name the row, with its link if that was given a rate."""
    return f"{row.place}, {row.link}" if row.link else row.place


def _heading(summary: Summary) -> str:
    sizes = "".join(f", {name} {size}" for name, size in summary.sizes.items())
    ranks = " and ".join(sorted({str(row.ranks) for row in summary.rows}))
    threads = f" of {summary.threads} thread{'s' * (summary.threads > 1)}" if summary.device == "cpu" else ""
    return (
        f"{summary.model}{sizes}: {summary.parameters / 1e6:.1f}M parameters, {_megabytes(summary.gradient_bytes)} of "
        f"gradients; batch {summary.batch}\n"
        f"{ranks} ranks{threads}, {summary.device}, {summary.backend}, torch {summary.torch}"
    )


def _table(rows: Sequence[Row]) -> str:
    number, unit = _scale(column.median for row in rows for column in row.ways.values())
    windows = sorted({row.steps for row in rows})
    titles = [*(WAYS[name].title for name in rows[0].ways), "limit"]
    lines = [
        ["", *(title.rpartition(" ")[0] for title in titles)],  # long titles on two lines
        ["", *(title.rpartition(" ")[2] for title in titles)],
    ]
    for row in rows:
        label = place(row) if len(windows) == 1 else f"{place(row)}, N = {row.steps}"
        lines.append([label, *(number(column.median) for column in row.ways.values()), number(row.limit)])
    what = f", accumulation {windows[0]}" if len(windows) == 1 else ""
    return f"{unit} per optimizer step{what}, medians\n{_grid(lines)}"


def _details(row: Row) -> str:
    number, unit = _scale(column.median for column in row.ways.values())
    counted = any(column.bytes_sent is not None for column in row.ways.values())
    lines = [["", unit, "quartiles", "to no_sync", "over the limit", *(["sent by a host"] if counted else [])]]
    for name, column in row.ways.items():
        low, high = column.quartiles
        over = f"{number(column.over_limit)} ({column.over_limit / row.limit:+.0%})"
        sent = [_megabytes(column.bytes_sent)] if column.bytes_sent is not None else []
        lines.append(
            [
                WAYS[name].title,
                number(column.median),
                f"{number(low)} - {number(high)}",
                f"{column.ratio:.2f}",
                over if name != "compute" else "",
                *sent,
            ]
        )
    return (
        f"{place(row)}: {row.rounds} rounds, each with every way once\n{_grid(lines)}\n"
        f"The link: one all_reduce of the gradients' bytes takes {number(row.link_seconds)} {unit}, "
        f"{row.link_bits_per_second / 1e9:.3g} Gbit/s from each rank.\n"
        f"The limit, {number(row.limit)} {unit}: computing alone, and the link's time that no backward can hide."
    )


def _per_micro_batch(summary: Summary) -> str:
    parts = []
    for name in dict.fromkeys(map(place, summary.rows)):
        rows = [row for row in summary.rows if place(row) == name]
        curves = {c.way: c for c in summary.curves if (c.place, c.link) == (rows[0].place, rows[0].link)}
        lines = [["ms per micro-batch", *(x for way in curves for x in (WAYS[way].title, "c + s/N"))]]
        for row in rows:
            cells = [f"N = {row.steps}"]
            for way, curve in curves.items():
                model = Cost(curve.micro_batch, curve.window).at(row.steps)
                cells += [_milliseconds(row.ways[way].median / row.steps), _milliseconds(model)]
            lines.append(cells)
        for letter, values in (
            ("c", [curve.micro_batch for curve in curves.values()]),
            ("s", [curve.window for curve in curves.values()]),
        ):
            lines.append([letter, *(cell for value in values for cell in ("", _milliseconds(value)))])
        parts.append(f"{name}\n{_grid(lines)}")
    return "\n\n".join(parts)


def _warnings(summary: Summary) -> Iterable[str]:
    if summary.missing:
        packages = " ".join(sorted(str(WAYS[name].package).replace("_", "-") for name in summary.missing))
        titles = ", ".join(WAYS[name].title for name in summary.missing)
        yield f"Left out, not installed: {titles} (`pip install {packages}`)."
    for row in summary.rows:
        apart = [WAYS[name].title for name, column in row.ways.items() if column.synchronised is False]
        if apart:
            yield (
                f"{place(row)}, {row.steps} steps: {', '.join(apart)} left the ranks with DIFFERENT parameters. "
                "They did not synchronise what they trained; these times mean nothing."
            )


def _advice(advice: Suggestion) -> str:
    now = f"{place(advice)}: in windows of {advice.steps}, synchronisation takes {advice.share:.0%} of the time"
    if advice.baseline_share is not None:
        now += f" ({advice.baseline_share:.0%} where every backward synchronises)"
    if advice.share < TARGET:
        return (
            f"{now}.\nThat is under {TARGET:.0%} already, and so it is from windows of {advice.enough_steps} on "
            f"(effective batch {advice.enough_effective_batch}; now {advice.effective_batch})."
        )
    return (
        f"{now}.\nWindows of {advice.enough_steps} are the shortest that bring it under {TARGET:.0%}. The effective "
        f"batch grows from {advice.effective_batch} to {advice.enough_effective_batch} with it: mind the learning rate."
    )


def _scale(seconds: Iterable[float]) -> tuple[Callable[[float], str], str]:
    """How to write seconds of about this size, and the unit they are then in."""
    if min(seconds) < 0.02:
        return _milliseconds, "ms"
    return (lambda x: f"{x:.3f}"), "s"


def _milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:.2f}"


def _megabytes(num_bytes: float) -> str:
    return f"{num_bytes / 1e6:.1f} MB"


def _grid(lines: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(
            [line[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True))]
        )
        for line in lines
    )
