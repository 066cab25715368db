"""Who takes part in a call: its models, optimizers, schedulers and scaler, found by type or named by keyword."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from gradsync._errors import GradSyncError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

Naming: TypeAlias = "Any | Callable[..., Any] | None"
"""An object, a tuple of objects, or a function of the call's arguments; None to look among those by type."""

_KINDS: tuple[tuple[type[Any], str], ...] = (
    (nn.Module, "model"),
    (Optimizer, "optimizer"),
    (LRScheduler, "scheduler"),
    (torch.amp.GradScaler, "scaler"),
)
_ANY = tuple(kind for kind, _ in _KINDS)


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

    def participants(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        """Everything that takes part in the call with these arguments, in a fixed order, for a quick comparison."""
        found = [one for one in (*args, *kwargs.values()) if isinstance(one, _ANY)]
        if self._by_type:
            return found
        named = []
        for kind, what in _KINDS:
            naming = getattr(self, what)
            if naming is None:
                named += [one for one in found if isinstance(one, kind)]
            else:
                named += _named(naming, kind, what, args, kwargs)
        return named

    def known(self) -> bool:
        """Whether models and optimizers are objects, known before any call."""
        return all(
            one is not None and (isinstance(one, tuple | nn.Module) or not callable(one))
            for one in (self.model, self.optimizer)
        )

    @cached_property
    def _by_type(self) -> bool:
        return self.model is self.optimizer is self.scheduler is self.scaler is None


def cast_of(participants: Sequence[Any]) -> Cast:
    """The participants by what they are."""
    models, optimizers, schedulers, scalers = (
        tuple(dict.fromkeys(one for one in participants if isinstance(one, kind))) for kind, _ in _KINDS
    )
    if len(scalers) > 1:
        raise GradSyncError("A call needs one GradScaler at most, but two came. Name one with scaler=...")
    return Cast(models, optimizers, schedulers, scalers[0] if scalers else None)


def check_cast(cast: Cast, name: str) -> None:
    """Raise unless there is a model and an optimizer."""
    for several, what in ((cast.models, "model"), (cast.optimizers, "optimizer")):
        if not several:
            raise GradSyncError(
                f"{name} needs a{'n' if what == 'optimizer' else ''} {what} among its arguments, but found none. Pass "
                f"it to the function, or name it: accumulating(..., {what}=lambda self, *_: self.{what})."
            )


def _named(naming: Naming, kind: type[Any], what: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    # A module is callable too, and meant as itself.
    named = naming(*args, **kwargs) if callable(naming) and not isinstance(naming, kind) else naming
    several = list(named) if isinstance(named, tuple | list) else [named]
    for one in several:
        if one is not None and not isinstance(one, kind):
            raise TypeError(
                f"accumulating({what}=...) needs a {kind.__name__}, a tuple of them, or a function of the call's "
                f"arguments that returns one, but it gave a {type(one).__name__}."
            )
    return [one for one in several if one is not None]
