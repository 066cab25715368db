"""The findings as a picture: bars for the table, curves for the sweeps."""

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from gradsync.bench._errors import BenchError
from gradsync.bench._hosts import rate
from gradsync.bench._rows import Row
from gradsync.bench._summary import Summary
from gradsync.bench._text import place
from gradsync.bench._ways import WAYS
from gradsync.bench._window_cost import Cost

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = {
    "baseline": "#8c564b",
    "improperly": "#e377c2",
    "no_sync": "#1f77b4",
    "accumulating": "#2ca02c",
    "accumulating_ddp": "#98df8a",
    "sync_every": "#17becf",
    "accelerate": "#ff7f0e",
    "fabric": "#9467bd",
    "overlap": "#bcbd22",
    "bf16": "#e7ba52",
    "both": "#d62728",
    "compute": "#7f7f7f",
}
MARKERS = dict(zip(COLOURS, "sPoD^vX*<>ph", strict=True))
"""Ways that cost the same are drawn over each other; different markers keep all of them visible."""


def check(path: Path) -> None:
    """Find out before measuring whether a picture can be drawn and saved."""
    if importlib.util.find_spec("matplotlib") is None:
        raise BenchError("--plot needs matplotlib, which is not installed here: `pip install 'gradsync[plot]'`.")
    if not path.parent.is_dir():
        raise BenchError(f"--plot {path}: there is no folder {path.parent}.")


def plot(summary: Summary, path: Path) -> "Figure":
    """Draw the summary, in the format of the file's ending."""
    from matplotlib.figure import Figure

    panels = _panels(summary)
    figure = Figure(figsize=(max(8.0, 6.5 * len(panels)), 5.2), layout="constrained")
    # Readers compare panels side by side, so these share their y axis if they show the same thing.
    same = not any(_sweeps_links(rows) for rows in panels)
    for axes, rows in zip(figure.subplots(1, len(panels), squeeze=False, sharey=same)[0], panels, strict=True):
        if len({row.steps for row in rows}) > 1:
            _steps_curves(axes, rows, summary)
        elif _sweeps_links(rows):
            _link_curves(axes, rows)
        else:
            _bars(axes, rows[0])
        axes.set_ylim(bottom=0)
        axes.tick_params(labelleft=True)
    ranks = " and ".join(sorted({str(row.ranks) for row in summary.rows}))
    figure.suptitle(
        f"{summary.model}, {summary.parameters / 1e6:.1f}M parameters, batch {summary.batch}, {summary.optimizer}, "
        f"{ranks} ranks, {summary.device}, {summary.backend}"
    )
    figure.savefig(path, dpi=150)
    return figure


def _panels(summary: Summary) -> list[list[Row]]:
    """The rows of each panel: in a sweep the window lengths of a place and link, else the links of a place."""
    sweep = len({row.steps for row in summary.rows}) > 1
    panels: dict[str, list[Row]] = {}
    for row in summary.rows:
        panels.setdefault(place(row) if sweep else row.place, []).append(row)
    return list(panels.values())


def _sweeps_links(rows: Sequence[Row]) -> bool:
    return len({row.link for row in rows}) > 1


def _bars(axes: "Axes", row: Row) -> None:
    names = list(row.ways)
    medians = [row.ways[name].median for name in names]
    low = [column.median - column.quartiles[0] for column in row.ways.values()]
    high = [column.quartiles[1] - column.median for column in row.ways.values()]
    bars = axes.bar(
        [WAYS[name].title.replace(" ", "\n", 1) for name in names],
        medians,
        color=[COLOURS[name] for name in names],
        yerr=(low, high),
        capsize=3,
    )
    axes.bar_label(bars, [f"{value:.3g}" for value in medians], label_type="center", color="white", weight="bold")
    axes.axhline(row.limit, color="black", linestyle="--", label=f"limit of exact ways, {row.limit:.3g} s")
    axes.tick_params(axis="x", labelsize="small", rotation=30)
    axes.set_ylabel("seconds per optimizer step (median, quartiles)")
    _finish(axes, f"{place(row)}, accumulation {row.steps}")


def _steps_curves(axes: "Axes", rows: Sequence[Row], summary: Summary) -> None:
    steps = [row.steps for row in rows]
    for curve in summary.curves:
        if (curve.place, curve.link) == (rows[0].place, rows[0].link):
            _points(axes, curve.way, steps, [1000 * row.ways[curve.way].median / row.steps for row in rows])
            cost = Cost(curve.micro_batch, curve.window)
            fine = [steps[0] * (steps[-1] / steps[0]) ** (i / 100) for i in range(101)]
            model = [1000 * (cost.micro_batch + cost.window / n) for n in fine]
            axes.plot(fine, model, color=COLOURS[curve.way], linewidth=1)
    axes.plot([], [], color="black", linewidth=1, label="fitted c + s/N")
    axes.set_xscale("log", base=2)
    axes.set_xticks(steps, [str(n) for n in steps])
    axes.set_xlabel("micro-batches in a window, N (log scale)")
    axes.set_ylabel("milliseconds per micro-batch (median)")
    _finish(axes, place(rows[0]))


def _link_curves(axes: "Axes", rows: Sequence[Row]) -> None:
    rows = sorted(rows, key=lambda row: rate(row.link or ""))
    rates = [rate(row.link or "") / 1e9 for row in rows]
    for way in rows[0].ways:
        _points(axes, way, rates, [row.ways[way].median for row in rows], line="-")
    axes.plot(rates, [row.limit for row in rows], color="black", linestyle="--", label="limit of exact ways")
    axes.set_xscale("log")
    axes.set_xticks(rates, [row.link or "" for row in rows])
    axes.minorticks_off()
    axes.set_xlabel("rate that the link was given (log scale)")
    axes.set_ylabel("seconds per optimizer step (median)")
    _finish(axes, f"{rows[0].place}, accumulation {rows[0].steps}")


def _points(axes: "Axes", way: str, x: Sequence[float], y: Sequence[float], line: str = "") -> None:
    axes.plot(
        x,
        y,
        linestyle=line,
        linewidth=1,
        marker=MARKERS[way],
        markerfacecolor="none",
        markersize=8,
        color=COLOURS[way],
        label=WAYS[way].title,
    )


def _finish(axes: "Axes", title: str) -> None:
    axes.set_title(title)
    axes.grid(axis="y", alpha=0.3)
    axes.set_axisbelow(True)
    axes.legend(fontsize="small")
    axes.spines[["top", "right"]].set_visible(False)
