"""The arithmetic of windows: functions of integers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeAlias

Steps: TypeAlias = int | Callable[[int], int]
"""How many micro-batches a window has: a number, or a function of the window's number."""


def check_steps(steps: object) -> None:
    """Raise unless `steps` can say how long a window is."""
    if not callable(steps):
        _check_size(steps, "steps")


def window_size(steps: Steps, window: int) -> int:
    """How many micro-batches window number `window` is planned to have.

    >>> window_size(4, 0), window_size(lambda window: min(1 + window, 8), 2)
    (4, 3)
    """
    if isinstance(steps, int):
        return steps
    size = steps(window)
    _check_size(size, f"steps({window})")
    return size


def sizes(num_micro_batches: int, steps: Steps) -> Iterator[int]:
    """The windows that `num_micro_batches` fall into, the tail included.

    >>> list(sizes(10, 4))
    [4, 4, 2]
    """
    window = 0
    while num_micro_batches > 0:
        size = min(window_size(steps, window), num_micro_batches)
        yield size
        num_micro_batches -= size
        window += 1


def correction(planned: int, num_ranks: int, num_micro_batches: int) -> float:
    """The factor that makes the engines' average the mean over all micro-batches of all ranks.

    Each rank divides each loss by the `planned` size, and the engines divide the sum by the number of ranks. That is
    right for a full window, where the factor is exactly 1.0 and costs no multiplication. Otherwise only
    `num_micro_batches` have come from all ranks.

    >>> correction(4, 2, 8), correction(4, 2, 5)
    (1.0, 1.6)
    """
    return planned * num_ranks / num_micro_batches


def _check_size(size: object, what: str) -> None:
    if isinstance(size, bool) or not isinstance(size, int):
        raise TypeError(
            f"{what} must be a positive int, or steps a function of the window's number that returns one, but it is "
            f"{size!r} of type {type(size).__name__}. Write, for example, steps=4."
        )
    if size < 1:
        raise ValueError(f"{what} must be at least 1, the micro-batches in a window, but it is {size}.")
