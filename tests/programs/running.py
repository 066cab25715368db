"""Running programs on real ranks, as many as you like."""

from __future__ import annotations

import pprint
import time

from hypothesis import HealthCheck, Phase, given, seed, settings

from tests.programs.compare import check
from tests.programs.draw import programs
from tests.programs.model import Model
from tests.programs.player import play, ready
from tests.programs.write import written

LIMIT = 20.0  # seconds a program may take; one takes a few hundredths
LIMIT_SHRINKING = 6.0  # once one has failed


class Totals:
    """What was run."""

    def __init__(self) -> None:
        self.programs = self.calls = self.windows = self.faults = 0
        self.ranks: dict[int, int] = {}
        self.actions: dict[str, int] = {}
        self.slowest, self.start = 0.0, time.monotonic()

    def add(self, program: dict, model: Model, seconds: float) -> None:
        self.programs += 1
        self.calls, self.windows, self.faults = (
            self.calls + model.num_calls, self.windows + model.num_windows, self.faults + model.num_faults)  # fmt: skip
        self.ranks[model.num_ranks] = self.ranks.get(model.num_ranks, 0) + 1
        for action in model.scripts[0]:
            self.actions[action[0]] = self.actions.get(action[0], 0) + 1
        self.slowest = max(self.slowest, seconds)

    def __str__(self) -> str:
        return (
            f"{self.programs} programs in {time.monotonic() - self.start:.0f} s ({dict(sorted(self.ranks.items()))} by "
            f"number of ranks): {self.calls} micro-batches, {self.windows} windows, {self.faults} failures; slowest "
            f"{self.slowest:.2f} s; actions {dict(sorted(self.actions.items()))}"
        )


def run(program: dict, pool, totals: Totals | None = None, limit: float = LIMIT) -> None:
    """One program on its ranks, compared."""
    model = written(program)
    start = time.monotonic()
    refusals = [["refused" in str(one["result"]) or "?" in str(one["result"]) for one in mine] for mine in model.expected]
    ranks = pool(program["ranks"])
    if not ranks._processes:
        ranks.run(ready)  # starting them is not the program's time
        start = time.monotonic()
    seen = ranks.run(play, program, model.scripts, refusals, limit=limit)
    if totals is not None:
        totals.add(program, model, time.monotonic() - start)
    check(program, model, seen)


def run_many(number: int, pool, start: int | None, *, shrink: bool = True) -> Totals:
    totals, limit = Totals(), LIMIT
    phases = [Phase.explicit, Phase.generate, *([Phase.shrink] if shrink else [])]

    @settings(
        max_examples=number, deadline=None, database=None, derandomize=start is None, phases=phases, print_blob=False,
        suppress_health_check=list(HealthCheck), report_multiple_bugs=False,
    )
    @given(programs())
    def every(program):
        nonlocal limit
        try:
            run(program, pool, totals, limit)
        except BaseException as error:
            error.program, limit = program, LIMIT_SHRINKING
            raise

    try:
        (every if start is None else seed(start)(every))()
    except BaseException as error:
        if hasattr(error, "program"):
            print("The smallest program that fails:", pprint.pformat(error.program, width=140), sep="\n")
        print(totals)
        raise
    return totals
