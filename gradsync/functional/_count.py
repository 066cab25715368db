"""What a window's `LossSum`s were sums over: added exactly, whatever types the counts have."""

from __future__ import annotations

import math

import torch


class Count:
    """Numbers that are added up as they come: integers exactly, others in float64, those on a device there.

    What came is a value: a tensor that is refilled later does not change it.
    """

    __slots__ = ("_number", "_on_device")

    def __init__(self) -> None:
        self._number: int | float = 0
        self._on_device: dict[tuple[torch.device, torch.dtype], torch.Tensor] = {}

    def add(self, count: float | torch.Tensor) -> None:
        """Add one count."""
        if not isinstance(count, torch.Tensor):
            self._number += _checked(count)
        elif count.device.type == "cpu":
            self._number += _checked(count.item())
        else:
            wide = widest(count) if count.is_floating_point() else torch.int64
            wider = count.detach().reshape(()).to(wide)
            odd = torch.full_like(wider, math.nan) if wide is not torch.int64 else torch.full_like(wider, -(2**62))
            wider = torch.where(wider < 0, odd, wider)
            place = wider.device, wide
            self._on_device[place] = self._on_device[place] + wider if place in self._on_device else wider.clone()

    @property
    def total(self) -> float | torch.Tensor:
        """The sum, as a number if nothing has to be waited for; NaN if it holds a count that is none."""
        if not self._on_device:
            return float(self._number)
        first, *others = (tensor.to(widest(tensor)) for tensor in self._on_device.values())
        total = first + self._number
        for other in others:
            total = total + other.to(total.device)
        return total

    def state(self) -> int | float:
        """The sum as a number, for a state; it waits for the device."""
        on_device = (tensor.item() for tensor in self._on_device.values())
        return sum(on_device, start=self._number)

    def load(self, number: float) -> None:
        """Go on from a number that `state` gave."""
        self._number, self._on_device = number, {}


def is_count(total: float) -> bool:
    """Whether a sum of counts can be divided by, or is zero: not negative, infinite or NaN."""
    return math.isfinite(total) and total >= 0


def _checked(number: float) -> float:
    # All ranks hear of what is no count with the window's table; raising here would leave the others waiting.
    return number if number >= 0 else math.nan


def widest(tensor: torch.Tensor) -> torch.dtype:
    """The floating dtype for sums on this tensor's device; mps has no float64."""
    return torch.float32 if tensor.device.type == "mps" else torch.float64
