"""The findings as text: a table, a comparison with the limit, and advice."""

from collections.abc import Iterable, Sequence

from gradsync.bench._advice import advice
from gradsync.bench._remedies import REMEDIES
from gradsync.bench._rows import Row
from gradsync.bench._summary import Summary
from gradsync.bench._text import grid, megabytes, milliseconds, place, scale
from gradsync.bench._ways import WAYS
from gradsync.bench._window_cost import Cost


def report(summary: Summary) -> str:
    """The whole summary, for a terminal."""
    sweep = len({row.steps for row in summary.rows}) > 1
    parts = [
        _heading(summary),
        _table(summary.rows),
        *([_per_micro_batch(summary)] if sweep else [_details(row) for row in summary.rows]),
        *_warnings(summary),
        *map(advice, summary.advice),
    ]
    return "\n\n".join(parts)


def _heading(summary: Summary) -> str:
    sizes = "".join(f", {name} {size}" for name, size in summary.sizes.items())
    ranks = " and ".join(sorted({str(row.ranks) for row in summary.rows}))
    threads = f" of {summary.threads} thread{'s' * (summary.threads > 1)}" if summary.device == "cpu" else ""
    return (
        f"{summary.model}{sizes}: {summary.parameters / 1e6:.1f}M parameters, {megabytes(summary.gradient_bytes)} of "
        f"gradients; batch {summary.batch}; {summary.optimizer}\n"
        f"{ranks} ranks{threads}, {summary.device}, {summary.backend}, torch {summary.torch}"
    )


def _table(rows: Sequence[Row]) -> str:
    number, unit = scale(column.median for row in rows for column in row.ways.values())
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
    return f"{unit} per optimizer step{what}, medians\n{grid(lines)}"


def _details(row: Row) -> str:
    number, unit = scale(column.median for column in row.ways.values())
    counted = any(column.bytes_sent is not None for column in row.ways.values())
    lines = [["", unit, "quartiles", "to no_sync", "over the limit", *(["sent by a host"] if counted else [])]]
    for name, column in row.ways.items():
        low, high = column.quartiles
        over = f"{number(column.over_limit)} ({column.over_limit / row.limit:+.0%})"
        sent = [megabytes(column.bytes_sent)] if column.bytes_sent is not None else []
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
    last_backward = max(0.0, row.ways["compute"].median / row.steps - row.forward)
    return (
        f"{place(row)}: {row.rounds} rounds, each with every way once; ratios and differences are of the medians\n"
        f"{grid(lines)}\n"
        f"The link: one all_reduce of the gradients' bytes takes {number(row.link_seconds)} {unit}, "
        f"{row.link_bits_per_second / 1e9:.3g} Gbit/s from each rank.\n"
        f"The limit of exact ways, {number(row.limit)} {unit}: computing alone, and what of the link's time the last "
        f"backward, of {number(last_backward)} {unit}, cannot hide.{_below(row)}"
    )


def _below(row: Row) -> str:
    """Explain why exact ways seem to be faster than the limit, if some do."""
    names = [WAYS[n].title for n, c in row.ways.items() if c.over_limit < 0 and n not in (*REMEDIES, "compute")]
    if not names:
        return ""
    return f"\nBelow it by noise, or because the link is not what takes the time here: {', '.join(names)}."


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
                cells += [milliseconds(row.ways[way].median / row.steps), milliseconds(model)]
            lines.append(cells)
        for letter, values in (
            ("c", [curve.micro_batch for curve in curves.values()]),
            ("s", [curve.window for curve in curves.values()]),
        ):
            lines.append([letter, *(cell for value in values for cell in ("", milliseconds(value)))])
        parts.append(f"{name}\n{grid(lines)}")
    return "\n\n".join(parts)


def _warnings(summary: Summary) -> Iterable[str]:
    if summary.missing:
        titles: dict[str, list[str]] = {}
        for name, why in summary.missing.items():
            titles.setdefault(why, []).append(WAYS[name].title)
        yield "\n".join(f"Left out: {', '.join(names)}; {why}." for why, names in titles.items())
    if any(min(curve.micro_batch, curve.window) < 0 for curve in summary.curves):
        yield "A c or s below zero is noise: these times do not follow c + s/N. Measure for longer (--seconds)."
    for row in summary.rows:
        apart = [WAYS[name].title for name, column in row.ways.items() if column.synchronised is False]
        if apart:
            yield (
                f"{place(row)}, {row.steps} steps: {', '.join(apart)} left the ranks with DIFFERENT parameters. "
                "They did not synchronise what they trained; these times mean nothing."
            )
