"""Random programs of calls, on 1 to 3 real ranks, do what a simple model in float64 says; nobody hangs.

    python tests/test_programs.py --programs 5000 --seed 1

runs as many as you like. A failing program is shrunk and printed; `--program FILE` runs one from a file again.
"""

from __future__ import annotations

import argparse
import ast
import math
import os
import pprint
import sys
import time

if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # DDP's advice on find_unused_parameters
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))  # not tests/, whose typing hides Python's

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from tests.programs.model import Model

LIMIT = 20.0  # seconds a program may take; one takes a few hundredths
LIMIT_SHRINKING = 6.0  # once one has failed
IN_PYTEST = int(os.environ.get("GRADSYNC_PROGRAMS", "250"))


# -- programs ---------------------------------------------------------------------------------------------------------

SMALL = st.integers(0, 3)
RANK = st.integers(0, 2)
FUNCTION = st.integers(0, 1)
COUNTS = st.sampled_from([[1], [0], [3, 1, 0, 2], [0, 0, 5], [2, 0.5, 7]])
EVENT = st.sampled_from(["skip", "skip_late", "raise", "raise_late", "backward", "backward_deep", "nan", "spoil", "spoil_deep"])


def a_list(element, most: int):
    return st.lists(element, max_size=most)


def an_op(**fields):
    return st.fixed_dictionaries({name: value if isinstance(value, st.SearchStrategy) else st.just(value)
                                  for name, value in fields.items()})


CALL = {"f": FUNCTION, "lane": st.integers(0, 1), "counts": COUNTS, "part": st.booleans()}
THEN = st.sampled_from([None] * 4 + ["resume", "resume", "save", "load", "flush", "reset_other"])
FAULTS = a_list(st.fixed_dictionaries({"rank": RANK, "at": st.integers(0, 6), "event": EVENT}), 3)
OPS = {
    "calls": an_op(do="calls", **CALL, windows=st.integers(0, 2), extras=st.tuples(SMALL, SMALL, SMALL), faults=FAULTS, then=THEN),
    "over": an_op(
        do="over", **CALL, lengths=st.tuples(*[st.integers(0, 7)] * 3), sized=st.booleans(), twice=st.booleans(),
        all_lanes=st.booleans(), faults=FAULTS, inner=st.none() | FUNCTION, nest=st.booleans(),
        passed=a_list(st.fixed_dictionaries({"rank": RANK, "item": st.integers(0, 6)}), 3),
        leave=st.none() | st.fixed_dictionaries({"how": st.sampled_from(["break", "boom"]), "item": st.integers(0, 4)}),
        then=THEN,
    ),
    "flush": an_op(do="flush", f=FUNCTION),
    "reset": an_op(do="reset", f=FUNCTION, all=st.booleans(), who=a_list(RANK, 2)),
    "save": an_op(do="save", f=FUNCTION, slot=st.integers(0, 0)),
    "load": an_op(do="load", f=FUNCTION, slot=st.integers(0, 0), torn=st.sampled_from([False] * 7 + [True])),
    "resume": an_op(do="resume", f=FUNCTION),
    "clash": an_op(do="clash", **CALL, g=FUNCTION),
    "cross": an_op(do="cross"),
    "boundary_fails": an_op(
        do="boundary_fails", **CALL, alone=st.sampled_from([False] * 3 + [True]), rank=RANK,
        event=st.sampled_from(["backward", "backward_deep"]),
    ),
    "sync": an_op(
        do="sync", lane=st.integers(0, 1), kind=st.sampled_from(["mean", "sum"]), counts=COUNTS, part=st.booleans(),
        lengths=st.tuples(*[st.integers(0, 6)] * 3), steps=a_list(st.integers(1, 3), 1).map(lambda x: [2, *x]),
        sized=st.booleans(), endless=st.booleans(), plain=st.booleans(), leave=st.none() | st.integers(0, 4),
    ),
}  # fmt: skip
OFTEN = ["calls"] * 4 + ["over"] * 6 + ["flush"] * 2 + ["save", "load", "reset", "resume", "clash", "boundary_fails"]
OFTEN += ["sync", "load", "load", "calls", "over", "cross"]


@st.composite
def programs(draw) -> dict:
    """Models on lanes (an optimizer each), functions on lanes, and what is done with them."""
    ranks = draw(st.sampled_from([1, 2, 2, 2, 3, 3]))
    wraps = ["bare", "bare", "ddp", "find_unused", "views", "small", "hook"]
    models = []
    for _ in range(draw(st.integers(1, 3))):
        wrap = draw(st.sampled_from(wraps))
        models.append({
            "wrap": wrap, "buffers": draw(st.booleans()), "unused": wrap in {"bare", "find_unused"} and draw(st.booleans()),
        })  # fmt: skip
    lanes = [{"models": [i], "momentum": draw(st.sampled_from([0, 0.9])), "decay": draw(st.booleans())}
             for i in range(min(2, len(models)))]
    if len(models) == 3:
        lanes[-1]["models"].append(2)
    functions = []
    for _ in range(2):
        mine = draw(st.sampled_from([[0], [1], [0, 1]])) if len(lanes) > 1 else [0]
        used = {m for lane in mine for m in lanes[lane]["models"]}
        others = [m for m in range(len(models)) if m not in used]
        functions.append({
            "lanes": mine,
            "steps": draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)),
            "tail": draw(st.sampled_from(["step", "step", "drop", "carry"])),
            "clip": draw(st.sampled_from([None, None, 0.05, 100.0])),
            "nonfinite": draw(st.sampled_from(["step", "skip", "raise"])),
            "skip": draw(st.booleans()),
            "kind": draw(st.sampled_from(["mean", "sum"])),
            "named": len(mine) == 1 and draw(st.booleans()),
            "watch": draw(st.sampled_from([None, *others])),
        })  # fmt: skip
    ops = draw(st.lists(st.sampled_from(OFTEN).flatmap(OPS.__getitem__), min_size=3, max_size=14))
    return {"ranks": ranks, "models": models, "lanes": lanes, "functions": functions, "ops": ops}


# -- the comparison ---------------------------------------------------------------------------------------------------


def close(a, b, tolerance: float = 1e-8, least: float = 1e-12) -> bool:
    """Whether `a` is what `b` says: close as numbers, in a list close for the largest of them, or "?" for whatever."""
    if b == "?":
        return True
    if a is None or b is None or isinstance(a, str) or isinstance(b, str):
        return a == b or (b == "refused" and isinstance(a, str) and a.startswith("refused: "))
    if isinstance(b, list | tuple):
        least = max([least, *(tolerance * abs(y) for y in b if isinstance(y, float) and math.isfinite(y))])
        return len(a) == len(b) and all(close(x, y, tolerance, least) for x, y in zip(a, b, strict=True))
    return math.isclose(a, b, rel_tol=tolerance, abs_tol=least) or (math.isnan(a) and math.isnan(b))


def check_progress(seen: dict, expected: dict, where: str) -> None:
    for name, value in expected.items():
        if name != "size" or value is not None:
            assert close(seen[name], value), f"{where}: progress.{name} is {seen[name]}, not {value}"


def check(program: dict, model: Model, seen: list) -> None:
    """What the ranks saw against what they had to see, and against each other."""
    for rank, (script, expectations) in enumerate(zip(model.scripts, model.expected, strict=True)):
        for number, (action, expected) in enumerate(zip(script, expectations, strict=True)):
            where = f"rank {rank}, action {number}, {action[0]} {action[1:2]}"
            mine, want = seen[rank][number], expected["result"]
            if action[0] == "calls":
                for place, (got, call) in enumerate(zip(mine["result"], want, strict=True)):
                    at = f"{where}, call {place}"
                    if call["loss"] == "?":
                        continue  # another rank failed in this boundary: an error or an end, but no hang
                    assert close(got["loss"], call["loss"]), f"{at}: {got['loss']}, not {call['loss']}"
                    assert call["stepped"] in {None, got["stepped"]}, f"{at}: stepped is {got['stepped']}"
                    check_progress(got["progress"], call["progress"], at)
            else:
                assert close(mine["result"], want), f"{where}: {mine['result']}, not {want}"
            if expected.get("ended") or "params" not in expected:
                continue
            for lane, (got, needed) in enumerate(zip(mine["updates"], expected["updates"], strict=True)):
                assert len(got) == len(needed), f"{where}: {len(got)} updates of lane {lane}, not {len(needed)}"
                for place, (x, y) in enumerate(zip(got, needed, strict=True)):
                    assert close(x, y), f"{where}: update {place} of lane {lane} is {x}, not {y}"
            assert close(mine["params"], expected["params"]), f"{where}: the parameters are off"
            for lane, clean in enumerate(expected["clean"]):
                assert not clean or mine["clean"][lane], f"{where}: gradients are left on lane {lane}"
            for f, progress in expected["progress"].items():
                check_progress(mine["progress"][f], progress, f"{where}, function {f}")
            first = seen[0][number]
            assert mine["params"] == first["params"], f"{where}: the replicas differ"
            assert mine["updates"] == first["updates"], f"{where}: the replicas' gradients differ"
            lane = expected["same_buffers"]
            if lane is not None:
                assert mine["buffers"][lane] == first["buffers"][lane], f"{where}: the buffers differ"


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
    model = Model(program)
    start = time.monotonic()
    refusals = [["refused" in str(one["result"]) or "?" in str(one["result"]) for one in mine] for mine in model.expected]
    ranks = pool(program["ranks"])
    if not ranks._processes:
        ranks.run("tests.programs.player:ready")  # starting them is not the program's time
        start = time.monotonic()
    seen = ranks.run("tests.programs.player:play", program, model.scripts, refusals, limit=limit)
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


# -- tests ------------------------------------------------------------------------------------------------------------


def test_random_programs_do_what_the_model_says(ranks, capsys):
    """Nothing is lost, replicas are equal after each window, counters are right, and each program ends in time."""
    totals = run_many(IN_PYTEST, ranks, None)
    with capsys.disabled():
        print(f"\n{totals}")
    assert totals.programs >= IN_PYTEST * 0.9


def main() -> None:
    parser = argparse.ArgumentParser(description="Random programs of gradsync calls on 1 to 3 real ranks.")
    parser.add_argument("--programs", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-shrink", action="store_true")
    parser.add_argument("--program", help="a file with one program, as a failure prints it")
    args = parser.parse_args()
    from tests.support.ranks import Ranks

    pools: dict = {}
    pool = lambda size: pools.setdefault(size, Ranks(size))  # noqa: E731
    try:
        if args.program:
            with open(args.program) as file:
                run(ast.literal_eval(file.read()), pool)
            print("as the model says")
        else:
            print(run_many(args.programs, pool, args.seed, shrink=not args.no_shrink))
    finally:
        for one in pools.values():
            one.stop()


if __name__ == "__main__":
    main()
