"""The arithmetic of a window: what it costs, what it cannot cost less than, and how long it should be.

A micro-batch costs `c` seconds. A window costs `s` seconds once: for the synchronisation, and for what else it does
once, such as the optimizer's step. So a window of N micro-batches takes N c + s, and each micro-batch in it

    c + s / N.

The cost of synchronisation is what a window takes beyond computing alone. Its share falls when N grows.
"""

from collections.abc import Mapping
from math import ceil, floor, fsum
from typing import NamedTuple

TARGET = 0.10
"""Below this share, synchronisation is not worth more work."""


class Cost(NamedTuple):
    """`c` and `s`, in seconds."""

    micro_batch: float
    window: float

    def at(self, steps: int) -> float:
        """Seconds a micro-batch in windows of `steps`."""
        return self.micro_batch + self.window / steps


def least_squares(seconds: Mapping[int, float]) -> Cost:
    """Fit `c` and `s` to the seconds per micro-batch that were measured at each window length.

    Least squares of the relative errors, because noise is proportional to the time, which is longer in short windows.
    """
    if len(seconds) == 1:
        raise ValueError("c + s/N needs times at two window lengths at least; they came at one.")
    weights = [1 / y**2 for y in seconds.values()]
    x_mean = fsum(w / n for w, n in zip(weights, seconds, strict=True)) / fsum(weights)
    y_mean = fsum(w * y for w, y in zip(weights, seconds.values(), strict=True)) / fsum(weights)
    slope = fsum(w * (1 / n - x_mean) * (y - y_mean) for w, (n, y) in zip(weights, seconds.items(), strict=True))
    slope /= fsum(w * (1 / n - x_mean) ** 2 for w, n in zip(weights, seconds, strict=True))
    return Cost(y_mean - slope * x_mean, slope)


def limit(*, compute: float, forward: float, link: float, steps: int) -> float:
    """Tell the least time that an exact window can take: it must compute, and send each gradient once and in full.

    Gradients are final only in the window's last backward, so only that backward can hide the sending. All in seconds:
    `compute` is a window without synchronisation, `forward` the forward of one micro-batch, `link` one synchronisation.
    """
    last_backward = max(0.0, compute / steps - forward)
    return compute - last_backward + max(last_backward, link)


def num_link_bits(gradient_bytes: int, ranks: int) -> float:
    """Count the bits that each rank must send in an all_reduce: those of a ring, which sends the fewest."""
    return 8 * gradient_bytes * 2 * (ranks - 1) / ranks


def share(sync: float, seconds: float) -> float:
    """Tell which share of a window's seconds synchronisation takes; 0 if noise makes it negative."""
    return max(0.0, sync) / seconds


def enough(sync: float, micro_batch: float) -> int:
    """Count the fewest micro-batches that bring the share under `TARGET`, if both costs stay as they are."""
    if micro_batch <= 0:
        raise ValueError(f"A micro-batch must cost some time; it came as {micro_batch:g} s.")
    steps = max(1, floor(sync * (1 / TARGET - 1) / micro_batch))
    while share(sync, steps * micro_batch + sync) >= TARGET:
        steps += 1
    return steps


def num_hiding(link: float, micro_batch: float, steps: int) -> int:
    """Count the micro-batches, of `steps` at most, that compute for as long as the gradients travel."""
    return min(steps, max(1, ceil(link / micro_batch)))
