"""The arguments of `accumulating`, checked once."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

from gradsync.decorator.participants import Finder
from gradsync.functional import NonFinite, Steps, Tail, Terms
from gradsync.overlap import check_compress, check_settings
from gradsync.parts import Cut, Fit

Sync = Literal["window", "each", "shard"]
Compress = Literal["bf16"]


@dataclass(frozen=True)
class Settings:
    """The arguments of `accumulating`."""

    steps: Steps
    finder: Finder
    clip_norm: float | None = None
    tail: Tail = "step"
    sync: Sync = "window"
    nonfinite: NonFinite = "step"
    skip: tuple[type[Exception], ...] = ()
    on_update: Callable[..., Any] | None = None
    overlap: int = 0
    compress: Compress | None = None
    fit: bool | Cut = False

    def __post_init__(self) -> None:
        for name, allowed in (("tail", Tail), ("sync", Sync), ("nonfinite", NonFinite)):
            if getattr(self, name) not in get_args(allowed):
                raise ValueError(f"{name} must be one of {get_args(allowed)}, but it is {getattr(self, name)!r}.")
        if self.clip_norm is not None:
            if isinstance(self.clip_norm, bool) or not isinstance(self.clip_norm, int | float):
                raise TypeError(
                    f"clip_norm must be a positive number or None, but it is {self.clip_norm!r}, of type "
                    f"{type(self.clip_norm).__name__}. Pass the largest norm that gradients may have: clip_norm=1.0."
                )
            if not self.clip_norm > 0:
                raise ValueError(f"clip_norm must be a positive number or None, but it is {self.clip_norm!r}.")
        _check_on_update(self.on_update)
        for one in self.skip:
            if not (isinstance(one, type) and issubclass(one, Exception)):
                of = "" if isinstance(one, type) else f", of type {type(one).__name__},"
                raise TypeError(f"skip must be a tuple of exception types, but {one!r}{of} is in it. Pass the classes.")
        check_compress(self.compress)
        if self.fit is not False:
            Fit(self.fit)  # which raises for what it cannot be
        self.terms()  # which looks at the steps
        check_settings(self.overlap, self.steps, sync=self.sync)

    def in_words(self) -> str:
        """The settings that differ from the defaults, as source code."""
        given = [one for one in fields(self) if one.name not in {"steps", "finder"}]
        changed = [(one.name, value) for one in given if (value := getattr(self, one.name)) != one.default]
        return ", ".join(f"{name}={_as_written(value)}" for name, value in [("steps", self.steps), *changed])

    def terms(self) -> Terms:
        """The settings that must be the same on all ranks."""
        words: dict[str, Any] = {"nonfinite": self.nonfinite, "clip_norm": self.clip_norm}
        words |= {"overlap": self.overlap, "compress": self.compress}
        return Terms(self.steps, self.tail, sync=self.sync, skip=self.skip, words=words)


def _as_written(value: object) -> str:
    return str(getattr(value, "__name__", None) or repr(value))


def _check_on_update(given: object) -> None:
    if given is not None and not callable(given):
        raise TypeError(
            f"on_update must be a function of the progress, but it is {given!r}, of type {type(given).__name__}. "
            "Write, for example, on_update=lambda progress: ema.update()."
        )
    if inspect.iscoroutinefunction(given) or inspect.isgeneratorfunction(given):
        raise TypeError(
            f"on_update must be a plain function, but {given!r} is async or a generator, which would never run. Call "
            "what it should do from a plain one."
        )
