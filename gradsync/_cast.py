"""Who takes part in a call: its models, optimizers, schedulers and scaler, found by type or named by keyword."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from typing_extensions import TypeAlias

from gradsync._errors import GradSyncError

Naming: TypeAlias = "Any | Callable[..., Any] | None"
"""An object, a tuple of objects, or a function of the call's arguments; None to look among those by type."""

_ANY = (nn.Module, Optimizer, LRScheduler, torch.amp.GradScaler)


class Cast(NamedTuple):
    """The participants of one call."""

    models: tuple[nn.Module, ...]
    optimizers: tuple[Optimizer, ...]
    schedulers: tuple[LRScheduler, ...]
    scaler: torch.amp.GradScaler | None


@dataclass(frozen=True)
class Casting:
    """How a decorated function's participants are found."""

    model: Naming = None
    optimizer: Naming = None
    scheduler: Naming = None
    scaler: Naming = None

    def of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Cast:
        """The participants of the call with these arguments, `self` among them for a method."""
        found = [one for one in args if isinstance(one, _ANY)]
        if kwargs:
            found += [one for one in kwargs.values() if isinstance(one, _ANY)]
        scalers = _pick(self.scaler, torch.amp.GradScaler, "scaler", found, args, kwargs)
        if len(scalers) > 1:
            raise GradSyncError("A call needs one GradScaler at most, but two came. Name one with scaler=...")
        return Cast(
            _pick(self.model, nn.Module, "model", found, args, kwargs),
            _pick(self.optimizer, Optimizer, "optimizer", found, args, kwargs),
            _pick(self.scheduler, LRScheduler, "scheduler", found, args, kwargs),
            scalers[0] if scalers else None,
        )

    def known(self) -> bool:
        """Whether models and optimizers are objects, known before any call."""
        return all(
            one is not None and (isinstance(one, tuple | nn.Module) or not callable(one))
            for one in (self.model, self.optimizer)
        )


def check_cast(cast: Cast, name: str) -> None:
    """Raise unless there is a model and an optimizer."""
    for several, what in ((cast.models, "model"), (cast.optimizers, "optimizer")):
        if not several:
            raise GradSyncError(
                f"{name} needs a{'n' if what == 'optimizer' else ''} {what} among its arguments, but found none. Pass it "
                f"to the function, or name it: accumulating(..., {what}=lambda self, *_: self.{what})."
            )


def _pick(
    naming: Naming, kind: type[Any], what: str, found: list[Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, ...]:
    if naming is None:
        return tuple(dict.fromkeys(one for one in found if isinstance(one, kind))) if found else ()
    # A module is callable too, and meant as itself.
    named = naming(*args, **kwargs) if callable(naming) and not isinstance(naming, kind) else naming
    several = tuple(named) if isinstance(named, tuple | list) else (named,)
    for one in several:
        if one is not None and not isinstance(one, kind):
            raise TypeError(
                f"accumulating({what}=...) needs a {kind.__name__}, a tuple of them, or a function of the call's "
                f"arguments that returns one, but it gave a {type(one).__name__}."
            )
    return tuple(one for one in several if one is not None)
