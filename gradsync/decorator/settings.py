"""The arguments of `accumulating`, checked once."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

from gradsync.decorator.participants import Finder
from gradsync.functional import NonFinite, Steps, Sync, Tail, Terms
from gradsync.overlap import check_compress, check_settings
from gradsync.parts import Cut, Fit

Compress = Literal["bf16"]


@dataclass(frozen=True, kw_only=True)
class Settings(Finder):
    """The arguments of `accumulating`, by their names."""

    steps: Steps
    clip_norm: float | None = None
    tail: Tail = "step"
    sync: Sync = "window"
    nonfinite: NonFinite = "step"
    skip: type[Exception] | tuple[type[Exception], ...] = ()
    on_update: Callable[..., Any] | None = None
    overlap: int = 0
    compress: Compress | None = None
    fit: bool | Cut = False

    def __post_init__(self) -> None:
        if self.nonfinite not in get_args(NonFinite):
            raise ValueError(f"nonfinite must be one of {get_args(NonFinite)}, but it is {self.nonfinite!r}.")
        clip_norm = self.clip_norm
        is_number = isinstance(clip_norm, int | float) and not isinstance(clip_norm, bool)
        if clip_norm is not None and not (is_number and clip_norm > 0):
            of = "" if is_number else f", of type {type(clip_norm).__name__}"
            raise (ValueError if is_number else TypeError)(
                f"clip_norm must be a positive number or None, but it is {clip_norm!r}{of}. Pass the largest norm that "
                "gradients may have: clip_norm=1.0."
            )
        given = self.on_update
        never_runs = inspect.iscoroutinefunction(given) or inspect.isgeneratorfunction(given)
        if given is not None and (never_runs or not callable(given)):
            raise TypeError(
                f"on_update must be a plain function of the progress, but it is {given!r}, "
                f"{'async or a generator' if never_runs else f'of type {type(given).__name__}'}. "
                "Write, for example, on_update=lambda progress: ema.update()."
            )
        self.terms()  # which looks at those that are the same on all ranks
        check_compress(self.compress)
        if self.fit is not False:
            Fit(self.fit)  # which raises for what it cannot be
        check_settings(self.overlap, self.steps, sync=self.sync)

    def in_words(self) -> str:
        """The settings that differ from the defaults, as source code."""
        own = [one for one in fields(self) if one.name not in Finder.__dataclass_fields__]
        changed = [(one.name, value) for one in own if (value := getattr(self, one.name)) != one.default]
        return ", ".join(f"{name}={getattr(value, '__name__', None) or repr(value)}" for name, value in changed)

    def terms(self) -> Terms:
        """The settings that must be the same on all ranks."""
        words: dict[str, Any] = {"nonfinite": self.nonfinite, "clip_norm": self.clip_norm}
        words |= {"overlap": self.overlap, "compress": self.compress}
        skip = self.skip if isinstance(self.skip, tuple) else (self.skip,)
        return Terms(self.steps, self.tail, sync=self.sync, skip=skip, words=words)
