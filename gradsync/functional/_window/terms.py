"""The settings of a run: how many micro-batches a window has, what becomes of a tail, who takes part."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias, get_args

from torch import nn
from torch.optim import Optimizer

from gradsync._errors import is_misuse
from gradsync.ranks.lost import is_lost

Steps: TypeAlias = int | Callable[[int], int]
"""How many micro-batches a window has: a number, or a function of the window's number."""


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


Sync: TypeAlias = Literal["window", "each", "shard"]
"""When engines synchronise: at the boundary; in each micro-batch; HSDP in each within its shards."""

Tail: TypeAlias = Literal["step", "drop", "carry"]
"""What becomes of a tail: an update with its exact mean; nothing; or it stays open for the next data."""


def ends_with_data(tail: Tail) -> bool:
    """Whether an open window closes when the data ends."""
    return tail != "carry"


_Repeats: TypeAlias = Literal["forwards", "always"]


@dataclass(frozen=True)
class Terms:
    """The settings of all windows of a run, the same on all ranks.

    `words` has other settings, which the ranks only compare. `skip` has the exception types that drop a micro-batch.
    `repeats` says when a rank whose data has ended must have a micro-batch to repeat: where "forwards" communicate,
    or "always". Without `keeps_losses` a closing has no mean loss: NaN or None.
    """

    steps: Steps
    tail: Tail = "step"
    repeats: _Repeats = "forwards"
    sync: Sync = "window"
    skip: tuple[type[Exception], ...] = ()
    words: Mapping[str, Any] = field(default_factory=dict)
    keeps_losses: bool = True

    def __post_init__(self) -> None:
        if not callable(self.steps):
            _check_size(self.steps, "steps")
        for name, allowed in (("tail", Tail), ("sync", Sync), ("repeats", _Repeats)):
            if getattr(self, name) not in get_args(allowed):
                raise ValueError(f"{name} must be one of {get_args(allowed)}, but it is {getattr(self, name)!r}.")
        for one in self.skip:
            if not (isinstance(one, type) and issubclass(one, Exception)):
                of = "" if isinstance(one, type) else f", of type {type(one).__name__},"
                raise TypeError(f"skip must be a tuple of exception types, but {one!r}{of} is in it. Pass the classes.")

    def skips(self, error: BaseException) -> bool:
        """Whether `skip` has the type of an error, and it is neither misuse nor means a lost rank."""
        return isinstance(error, self.skip) and not (is_misuse(error) or is_lost(error))

    def in_words(self, number: int) -> dict[str, Any]:
        """What the ranks compare for window `number`."""
        steps = window_size(self.steps, number)
        skip = [kind.__name__ for kind in self.skip]
        kind = "a function" if callable(self.steps) else "a number"
        return {
            "steps": steps, "kind of steps": kind, "tail": self.tail, "sync": self.sync, "skip": skip, **self.words
        }  # fmt: skip


class Who:
    """The models and optimizers whose windows these are, held weakly. Without optimizers, all models are trained."""

    __slots__ = ("_models", "_optimizers")

    def __init__(self, models: Sequence[nn.Module] = (), optimizers: Sequence[Optimizer] = ()) -> None:
        self._models = [weakref.ref(model) for model in models]
        self._optimizers = [weakref.ref(optimizer) for optimizer in optimizers]

    @property
    def models(self) -> list[nn.Module]:
        """Those that are alive."""
        return [model for ref in self._models if (model := ref()) is not None]

    @property
    def optimizers(self) -> list[Optimizer]:
        """Those that are alive."""
        return [optimizer for ref in self._optimizers if (optimizer := ref()) is not None]
