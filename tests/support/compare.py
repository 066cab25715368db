"""Comparing what came with what had to come: number, None, shape, type and value, each of which must be right."""

from __future__ import annotations

import torch


def difference(got, expected, tolerance: float = 1e-12) -> str | None:
    """How a tensor or None is not the one expected, or None where it is.

    Values may be off by `tolerance` times the largest of the expected (a gradient is a sum of parts that cancel, whose
    rounding is that of its largest), and by a hundredth of it in any case: where zeros are expected, that alone is left.
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


def _told(value) -> str:
    return "None" if value is None else f"a tensor of {tuple(value.shape)}"


def assert_equal_updates(seen, expected, tolerance: float = 1e-12) -> None:
    """Two lists of updates, each a list of gradients by parameter."""
    assert len(seen) == len(expected), f"{len(seen)} updates instead of {len(expected)}"
    for number, (mine, right) in enumerate(zip(seen, expected, strict=True)):
        assert len(mine) == len(right), f"update {number}: {len(mine)} gradients instead of {len(right)}"
        for place, (x, y) in enumerate(zip(mine, right, strict=True)):
            wrong = difference(x, y, tolerance)
            assert wrong is None, f"update {number}, parameter {place}: {wrong}"


def assert_equal_states(came: list, expected: list, tolerance: float = 1e-10) -> None:
    """Two lists of states; a single tensor among them is compared as it is."""
    assert len(came) == len(expected), f"{len(came)} states instead of {len(expected)}"
    for number, (mine, right) in enumerate(zip(came, expected, strict=True)):
        mine, right = (one if isinstance(one, dict) else {"value": one} for one in (mine, right))
        assert_equal_state(mine, right, tolerance, f"state {number}, ")


def assert_equal_state(came: dict, expected: dict, tolerance: float = 0.0, where: str = "") -> None:
    """Tensors and plain values by name; to the bit, if nothing else is said."""
    assert came.keys() == expected.keys(), f"{where}{sorted(came)} are not {sorted(expected)}"
    for name, value in expected.items():
        if isinstance(value, torch.Tensor):
            wrong = difference(came[name], value, tolerance)
            assert wrong is None, f"{where}{name}: {wrong}"
        else:
            assert came[name] == value, f"{where}{name}: {came[name]} is not {value}"
