"""What was tried, printed as a table for the terminal, in Markdown, or as JSON."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from string import ascii_lowercase
from typing import TYPE_CHECKING, Any, NamedTuple

from gradsync.verify.homes import HOMES
from gradsync.verify.table import CELLS, ROWS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from gradsync.verify._job import Wrong

_OF_ANOTHER = ("it hangs", "nothing came", "it said nothing")  # often a consequence of another rank's error
_LONGEST = 300  # characters of an error, in a table


class Tried(NamedTuple):
    """A cell that was tried; `wrong` is empty if its promise holds."""

    wrong: Wrong


class Ranks(NamedTuple):
    """How many ranks engines are tried on. One rank alone may have no process group, as under a plain python."""

    num: int
    is_joined: bool = True

    def __str__(self) -> str:
        return f"{self.num} rank{'s' if self.num > 1 else ''}"


@dataclass
class Report:
    """The outcomes so far."""

    rows: list[str]
    engines: dict[str, Ranks] = field(default_factory=dict)
    tried: dict[tuple[str, str], Tried] = field(default_factory=dict)
    machines: dict[Ranks, dict[str, str]] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    """Engines that cannot be tried here, and why."""

    @property
    def wrong(self) -> list[tuple[str, str, Wrong]]:
        """The cells whose promise does not hold."""
        return [(*cell, tried.wrong) for cell, tried in self.tried.items() if tried.wrong]

    @property
    def holds(self) -> bool:
        """Whether something was tried, and all of it holds."""
        return bool(self.tried) and not self.wrong


def as_text(report: Report, facts: Mapping[str, str]) -> str:
    """The table for a terminal, where engines have numbers."""
    notes = _Notes(report)
    width = max((len(ROWS[row].title) for row in report.rows), default=0)
    lines = [*_heading(report, facts), ""]
    lines += [f"{number:>3}  {HOMES[engine].title}" for number, engine in enumerate(report.engines, start=1)]
    lines += ["", " " * width + "".join(f"{number:>4}" for number in range(1, len(report.engines) + 1))]
    for row in report.rows:
        marks = "".join(f"{notes.mark(engine, row):>4}" for engine in report.engines)
        lines.append(f"{ROWS[row].title:<{width}}{marks}")
    return "\n".join([*lines, "", *notes.lines(), *_left_out(report), *_told(report), _verdict(report)])


def as_markdown(report: Report, facts: Mapping[str, str]) -> str:
    """The table for the documentation."""
    notes = _Notes(report)
    titles = [HOMES[engine].title for engine in report.engines]
    lines = [*_heading(report, facts), "", "| |" + "".join(f" {title} |" for title in titles)]
    lines.append("|---|" + "---|" * len(titles))
    for row in report.rows:
        marks = "".join(f" {notes.mark(engine, row)} |" for engine in report.engines)
        lines.append(f"| {ROWS[row].title} |{marks}")
    return "\n\n".join(["\n".join(lines), *notes.lines(), *_left_out(report), *_told(report), _verdict(report)])


def as_json(report: Report, facts: Mapping[str, str]) -> str:
    """All cells for programs, with what was wrong, or why they were not tried."""
    cells = []
    for engine in report.engines:
        for row in report.rows:
            cell, tried = CELLS[engine, row], report.tried.get((engine, row))
            told: dict[str, Any] = {
                "engine": engine,
                "promise": row,
                "holds": None if tried is None else not tried.wrong,
            }
            if cell.why_not is not None:
                told["why_not"] = cell.why_not
            error = cell.error_on(report.engines[engine].num)
            if error is not None:
                told["error"] = error
            if tried is not None and tried.wrong:
                told["wrong"] = [{"rank": rank, "said": text} for rank, text in tried.wrong]
            cells.append(told)
    machines = [{"ranks": ranks.num, **machine} for ranks, machine in report.machines.items()]
    return json.dumps(
        {"holds": report.holds, **facts, "on": machines, "cells": cells, "left_out": report.left_out}, indent=2
    )


class _Notes:
    """A mark for each cell, and a letter for each sentence that explains one that is neither ✓ nor ✗."""

    def __init__(self, report: Report) -> None:
        self._report = report
        self._letters: dict[str, str] = {}

    def mark(self, engine: str, row: str) -> str:
        cell, tried = CELLS[engine, row], self._report.tried.get((engine, row))
        if tried is not None and tried.wrong:
            return "✗"
        if cell.why_not is not None:
            return self._letter(cell.why_not)
        if tried is None:
            return "?"
        error = cell.error_on(self._report.engines[engine].num)
        if error is not None:
            return self._letter(f'an error, as it must be: "{_readable(error)}"')
        return "✓"

    def lines(self) -> list[str]:
        return [f"{letter}: {sentence}" for sentence, letter in self._letters.items()]

    def _letter(self, sentence: str) -> str:
        return self._letters.setdefault(sentence, ascii_lowercase[len(self._letters) % 26])


def _readable(pattern: str) -> str:
    return pattern.replace(r"\d+", "N").replace(", .*,", " ...").replace(".*", "").replace(" ,", ",")


def _heading(report: Report, facts: Mapping[str, str]) -> list[str]:
    where = [
        f"{ranks} on {machine.get('device', '?')}" + (f" by {machine['backend']}" if "backend" in machine else "")
        for ranks, machine in report.machines.items()
    ]
    return [f"torch {facts['torch']}, Python {facts['python']}, {facts['machine']}: {'; '.join(where)}"]


def _left_out(report: Report) -> list[str]:
    return [f"{HOMES[engine].title} was not tried: {why}." for engine, why in report.left_out.items()]


def _told(report: Report) -> list[str]:
    lines = []
    for engine, row, wrong in report.wrong:
        rank, text = min(wrong, key=lambda one: one[1].startswith(_OF_ANOTHER))
        first = text.partition("\n")[0][:_LONGEST]
        others = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
        lines.append(f"✗ {HOMES[engine].title}, {ROWS[row].title}: rank {rank}{others}: {first}")
    return lines


def _verdict(report: Report) -> str:
    num, num_wrong = len(report.tried), len(report.wrong)
    if num_wrong:
        return f"{num_wrong} of {num} promises do not hold. Open an issue with the output of --json."
    return f"All {num} promises hold." if num else "Nothing was tried."
