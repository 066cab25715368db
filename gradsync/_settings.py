"""The arguments of `accumulating`, checked once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

from gradsync.functional._update import NonFinite
from gradsync.functional._window import Steps, check_steps

if TYPE_CHECKING:
    from gradsync._cast import Casting

Tail = Literal["step", "drop", "carry"]
Sync = Literal["window", "each", "shard"]


@dataclass(frozen=True)
class Settings:
    """What a user said to `accumulating`."""

    steps: Steps
    casting: Casting
    clip_norm: float | None = None
    tail: Tail = "step"
    sync: Sync = "window"
    nonfinite: NonFinite = "step"
    skip: tuple[type[Exception], ...] = ()

    def __post_init__(self) -> None:
        check_steps(self.steps)
        for name, allowed in (("tail", Tail), ("sync", Sync), ("nonfinite", NonFinite)):
            if getattr(self, name) not in get_args(allowed):
                raise ValueError(f"{name} must be one of {get_args(allowed)}, but it is {getattr(self, name)!r}.")
        if self.clip_norm is not None and not (isinstance(self.clip_norm, int | float) and self.clip_norm > 0):
            raise ValueError(f"clip_norm must be a positive number or None, but it is {self.clip_norm!r}.")
        for kind in self.skip:
            if not (isinstance(kind, type) and issubclass(kind, Exception)):
                raise TypeError(f"skip must be a tuple of exception types, but {kind!r} is in it. Pass the classes.")
