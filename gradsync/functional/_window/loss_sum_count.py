"""`Count`: the sum of the counts of a window's `LossSum`s, exact for all types of counts."""

from __future__ import annotations

import math

import torch

from gradsync._loss import widest


class Count:
    """A sum of counts: integers are added exactly, others in float64, and tensors on their device.

    Counts are read at once: a tensor that is refilled later does not change the sum.
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
            wider = wider.masked_fill(wider < 0, -(2**62) if wide is torch.int64 else math.nan)  # a copy, too
            place = wider.device, wide
            self._on_device[place] = self._on_device.get(place, 0) + wider

    @property
    def total(self) -> float | torch.Tensor:
        """The sum: a tensor if any count is on a device, else a number. NaN if a count was negative or NaN."""
        if not self._on_device:
            return float(self._number)
        first, *others = (tensor.to(widest(tensor)) for tensor in self._on_device.values())
        total = first + self._number
        for other in others:
            total = total + other.to(total.device)
        return total

    def state(self) -> int | float:
        """The sum as a number, for a checkpoint; waits for the device."""
        on_device = (tensor.item() for tensor in self._on_device.values())
        return sum(on_device, start=self._number)

    def load(self, number: float) -> None:
        """Go on from a number that `state` gave."""
        self._number, self._on_device = number, {}


def _checked(number: float) -> float:
    # The table tells all ranks of a wrong count, and all of them raise. To raise here would leave the others waiting.
    return number if number >= 0 else math.nan
