"""Drawing programs at random."""

from __future__ import annotations

from hypothesis import strategies as st

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
