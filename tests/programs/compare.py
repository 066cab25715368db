"""What the ranks saw against what they had to see."""

from __future__ import annotations

import math

from tests.programs.model import Model


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
