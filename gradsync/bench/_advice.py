"""The arithmetic of a window: what it costs, what it cannot cost less than, and how long it should be.

A micro-batch costs `c`. A window of N of them costs `s` once: the synchronisation, and what else a window does once,
such as the optimizer's step. So its seconds are N c + s, and those of a micro-batch in it

    c + s / N.

Synchronisation takes what a window costs beyond computing alone. Its share of the window falls as N grows.
"""

from collections.abc import Mapping
from math import ceil, floor, fsum
from typing import NamedTuple

TARGET = 0.10
"""The share under which synchronisation is worth no more thought."""


class Cost(NamedTuple):
    """`c` and `s`, in seconds."""

    micro_batch: float
    window: float

    def at(self, steps: int) -> float:
        """Seconds a micro-batch in windows of `steps`."""
        return self.micro_batch + self.window / steps


def fit(seconds: Mapping[int, float]) -> Cost:
    """Find the `c` and `s` nearest to the seconds a micro-batch that were measured at each window length.

    Nearest by least squares of the relative errors: noise is a share of the time, and a short window's is longer.
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
    """Tell the least that an exact window can take: it must compute, and send each gradient once and in full.

    Gradients are final only in the window's last backward, so no more than that backward can hide the sending. In
    seconds, `compute` is a window alone, `forward` one micro-batch's forward, `link` one synchronisation's bytes.
    """
    last_backward = max(0.0, compute / steps - forward)
    return compute - last_backward + max(last_backward, link)


def num_link_bits(gradient_bytes: int, ranks: int) -> float:
    """Count what each rank must send in an all_reduce: a ring's bits, which are the fewest there are."""
    return 8 * gradient_bytes * 2 * (ranks - 1) / ranks


def share(sync: float, seconds: float) -> float:
    """Tell which part of a window's seconds synchronisation takes; noise below zero is none."""
    return max(0.0, sync) / seconds


def enough(sync: float, micro_batch: float) -> int:
    """Count the fewest micro-batches that bring the share under `TARGET`, if what each window and each cost stays."""
    if micro_batch <= 0:
        raise ValueError(f"A micro-batch must cost some time; it came as {micro_batch:g} s.")
    steps = max(1, floor(sync * (1 / TARGET - 1) / micro_batch))
    while share(sync, steps * micro_batch + sync) >= TARGET:
        steps += 1
    return steps


def num_hiding(link: float, micro_batch: float, steps: int) -> int:
    """Count the micro-batches, of `steps` at most, that compute for as long as the gradients travel."""
    return min(steps, max(1, ceil(link / micro_batch)))
