"""Compares what came with what was expected: number, None, shape, type and values must all be right."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


class Off(AssertionError):  # noqa: N818 - reads as a word where it is told of
    """What came is not what was expected."""


def need(holds: object, what: str) -> None:
    """Raise unless it holds; unlike assert, also with -O."""
    if not holds:
        raise Off(what)


def difference(got: torch.Tensor | None, expected: torch.Tensor | None, tolerance: float = 1e-12) -> str | None:
    """How a tensor or None differs from the expected one; None if it does not.

    Values may be off by `tolerance * (largest + 0.01)`. `largest` is the largest expected value, because a gradient is
    a sum of parts that cancel, and is rounded like the largest of them. The 0.01 is for expected zeros.
    """
    if got is None or expected is None:
        return None if got is expected else f"it is {_told(got)}, not {_told(expected)}"
    if got.shape != expected.shape:
        return f"its shape is {tuple(got.shape)}, not {tuple(expected.shape)}"
    if got.dtype != expected.dtype:
        return f"its dtype is {got.dtype}, not {expected.dtype}"
    if got.numel() == 0 or torch.equal(got, expected):
        return None
    if not torch.equal(got.isnan(), expected.isnan()):
        return f"NaNs are elsewhere: {got} is not {expected}"
    exact = torch.where(expected.isfinite(), expected, 0).abs().max().item()
    off = torch.where(got == expected, 0, (got - expected).abs()).nan_to_num(0.0, float("inf")).max().item()
    bound = tolerance * (exact + 0.01)
    return None if off <= bound else f"it is off by {off}, and may be by {bound}: {got} is not {expected}"


def _told(value: torch.Tensor | None) -> str:
    return "None" if value is None else f"a tensor of {tuple(value.shape)}"


def assert_equal_states(came: Sequence[Any], expected: Sequence[Any], tolerance: float = 1e-10) -> None:
    """Compare two lists of states, which may also have single tensors."""
    need(len(came) == len(expected), f"{len(came)} states instead of {len(expected)}")
    for number, states in enumerate(zip(came, expected, strict=True)):
        mine, right = (one if isinstance(one, dict) else {"value": one} for one in states)
        assert_equal_state(mine, right, tolerance, f"state {number}, ")


def assert_equal_state(
    came: Mapping[str, Any], expected: Mapping[str, Any], tolerance: float = 0.0, where: str = ""
) -> None:
    """Compare tensors and plain values by name; to the bit, unless there is a tolerance."""
    need(came.keys() == expected.keys(), f"{where}{sorted(came)} are not {sorted(expected)}")
    for name, value in expected.items():
        if isinstance(value, torch.Tensor):
            wrong = difference(came[name], value, tolerance)
            need(wrong is None, f"{where}{name}: {wrong}")
        else:
            need(came[name] == value, f"{where}{name}: {came[name]} is not {value}")
