"""Many cases in one call on the ranks: what a call costs is paid once, and each failing case is still told by its name."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
import torch.distributed as dist

from tests.changes.rule import LIMIT, Outcome, exact_or_error

_TOLD = 5  # failing cases that are told: each may take its whole limit


class Raised(NamedTuple):
    """What a case raised on a rank, in a place where a value was expected."""

    text: str


def each(ranks, size: int, case: Callable, cases: Iterable[tuple], check: Callable, limit: float = LIMIT) -> None:
    """`case(*args)` for all args of `cases` on `size` ranks, then `check(values, *args)` for each of them.

    On one rank it runs right here. Where something fails, the cases are run again, each in a call of its own, for a
    failure may reach the next case: those that fail then are told.
    """
    cases = [tuple(args) for args in cases]
    together = _together(ranks, size, case, cases, limit)
    first = _failures(zip(cases, together), check)
    if not first and len(together) == len(cases):
        return
    alone = {}
    for args in cases:
        alone |= dict(_failures([(args, _alone(ranks, size, case, args, limit))], check))
        if len(alone) == _TOLD:
            break
    told = alone or dict(first) or {"all of them": f"only {len(together)} of {len(cases)} ran together"}
    where = "" if alone else " after the others, and not alone"
    raise AssertionError(f"{case.__name__} on {size} ranks{where}:\n" + "\n".join(f"{a}: {t}" for a, t in told.items()))


def hold(ranks, size: int, case: Callable, cases: Iterable[tuple], *, says: str = "", only: Callable | str = "",
         limit: float = LIMIT) -> None:  # fmt: skip
    """The rule, for each of these cases; `only(*args)` may demand one outcome of some of them."""

    def check(values: list, *args: object) -> None:
        demanded = only if isinstance(only, str) else only(*args)
        exact_or_error([v if isinstance(v, Outcome) else Outcome("foreign", str(v)) for v in values], says, demanded)

    each(ranks, size, case, cases, check, limit)


def _together(ranks, size: int, case: Callable, cases: list[tuple], limit: float) -> list[list]:
    """The values of as many cases as ran, each a list by rank."""
    if size == 1:
        return [[value] for value in _run_all(case, cases)]
    outcomes = ranks(size).outcomes(_run_all, case, cases, limit=limit + 2 * len(cases))
    if not all(ok for ok, _ in outcomes):
        return []
    return [list(values) for values in zip(*(values for _, values in outcomes))]


def _alone(ranks, size: int, case: Callable, args: tuple, limit: float) -> list:
    if size == 1:
        return _run_all(case, [args])
    outcomes = ranks(size).outcomes(_run_all, case, [args], limit=limit)
    return [value[0] if ok else Raised(value) for ok, value in outcomes]


def _failures(cases: Iterable[tuple[tuple, list]], check: Callable) -> list[tuple[str, str]]:
    failures = []
    for args, values in cases:
        raised = [f"rank {rank}: {value.text}" for rank, value in enumerate(values) if isinstance(value, Raised)]
        try:
            if raised:
                raise AssertionError("\n".join(raised))
            check(values, *args)
        except AssertionError as error:
            failures.append((str(args), str(error)))
    return failures


def _run_all(case: Callable, cases: list[tuple]) -> list:
    """On each rank: one case after another, up to the first that ends differently on another rank."""
    values: list = []
    for args in cases:
        torch.manual_seed(0)
        try:
            value = case(*args)
        except Exception:  # noqa: BLE001 - told by its case
            value = Raised(traceback.format_exc(limit=-4))
        values.append(value)
        if dist.is_initialized() and not _agree(value):
            break
    return values


def _agree(value: object) -> bool:
    """Whether this case ended alike on all ranks, so that the next one may begin."""
    kind = value.kind if isinstance(value, Outcome) else type(value).__name__
    mine = torch.tensor([int.from_bytes(kind.encode()[:4], "big")])
    least, most = mine.clone(), mine.clone()
    dist.all_reduce(least, dist.ReduceOp.MIN)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    return bool(least == most) and not isinstance(value, Raised)
