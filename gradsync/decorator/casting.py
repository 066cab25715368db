"""Finds the participants of a call (models, optimizers, schedulers, scaler), by type or by keyword."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from gradsync._errors import GradSyncError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

Naming: TypeAlias = "Any | Callable[..., Any] | None"
"""An object, a tuple of objects, or a function of the call's arguments; None to search the arguments by type."""

_CONTAINERS = (tuple, list, set, dict)
_LOOKED_THROUGH = 64  # items of a container among the arguments, for participants that are hidden in it


class Cast(NamedTuple):
    """The participants of one call."""

    models: tuple[nn.Module, ...]
    optimizers: tuple[Optimizer, ...]
    schedulers: tuple[Any, ...]
    scaler: torch.amp.GradScaler | None


@dataclass(frozen=True)
class Casting:
    """How a decorated function's participants are found."""

    model: Naming = None
    optimizer: Naming = None
    scheduler: Naming = None
    scaler: Naming = None
    _candidates: dict[type, bool] = field(default_factory=dict, repr=False, compare=False)

    def participants(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        """All participants of a call with these arguments, in a fixed order, for a quick comparison."""
        known = self._candidates
        came = (*args, *kwargs.values()) if kwargs else args
        found = [one for one in came if (known[type(one)] if type(one) in known else self._may_be(one))]
        if self._by_type:
            return found
        named = []
        for kind in _KINDS:
            naming = getattr(self, kind)
            if naming is None:
                named += [one for one in found if kind_of(one) == kind]
            else:
                named += _named(naming, kind, args, kwargs)
        return named

    def refuse_hidden(
        self, participants: Sequence[Any], args: tuple[Any, ...], kwargs: dict[str, Any], name: str
    ) -> None:
        """Raise for an optimizer, scheduler or scaler in a container among the arguments, unless it is named."""
        for one in (*args, *kwargs.values()):
            if not isinstance(one, _CONTAINERS):
                continue
            for inner in _inside(one):
                kind = kind_of(inner)
                if kind not in {None, "model"} and not any(inner is taken for taken in participants):
                    raise GradSyncError(
                        f"{name} takes part with what is an argument of its own or named by keyword, but a {kind} "
                        f"({type(inner).__name__}) came in a {type(one).__name__}, where it would be passed over. Pass "
                        f"it as an argument, or name it: accumulating(..., {kind}=lambda *args: ...)."
                    )

    def known(self) -> bool:
        """Whether models and optimizers are objects, known before any call."""
        return all(
            one is not None and (isinstance(one, tuple | nn.Module) or not callable(one))
            for one in (self.model, self.optimizer)
        )

    def _may_be(self, one: object) -> bool:
        """Whether it may be a participant, judged by its class (quick); `kind_of` decides."""
        kinds = (nn.Module, Optimizer, LRScheduler, torch.amp.GradScaler)
        candidate = isinstance(one, kinds) or callable(getattr(type(one), "step", None))
        self._candidates[type(one)] = candidate
        return candidate

    @cached_property
    def _by_type(self) -> bool:
        return self.model is self.optimizer is self.scheduler is self.scaler is None


_KINDS = ("model", "optimizer", "scheduler", "scaler")


def kind_of(one: object) -> str | None:
    """As what an object takes part; None if it does not. A scheduler has a `step` and the optimizer that it moves."""
    if isinstance(one, nn.Module):
        return "model"
    if isinstance(one, Optimizer):
        return "optimizer"
    if isinstance(one, torch.amp.GradScaler):
        return "scaler"
    return "scheduler" if isinstance(one, LRScheduler) or _moves(one) else None


def cast_of(participants: Sequence[Any]) -> Cast:
    """The participants, sorted by kind."""
    kinds = [(one, kind_of(one)) for one in participants]
    models, optimizers, schedulers, scalers = (
        tuple({id(one): one for one, own in kinds if own == kind}.values()) for kind in _KINDS
    )
    if len(scalers) > 1:
        raise GradSyncError("A call needs one GradScaler at most, but two came. Name one with scaler=...")
    return Cast(models, optimizers, schedulers, scalers[0] if scalers else None)


def check_cast(cast: Cast, name: str, came: Sequence[object], *, is_method: bool) -> None:
    """Raise unless there is a model and an optimizer; `came` are the call's arguments."""
    for several, what in ((cast.models, "model"), (cast.optimizers, "optimizer")):
        if not several:
            how = f"lambda self, *_: self.{what}" if is_method else what
            raise GradSyncError(
                f"{name} needs a{'n' if what == 'optimizer' else ''} {what} among its arguments, but found none. What "
                f"came is {', '.join(type(one).__name__ for one in came) or 'nothing'}. Pass it to the function as an "
                f"argument of its own, or name it: accumulating(..., {what}={how})."
            )


def _moves(one: object) -> bool:
    """Whether it has a step and an optimizer (schedulers of timm, Accelerate), and no model (a trainer)."""
    if not callable(getattr(one, "step", None)) or isinstance(one, type):
        return False
    own = getattr(one, "__dict__", {})
    inner = [*_several(own.get("optimizer")), *_several(own.get("optimizers"))]
    return any(isinstance(o, Optimizer) for o in inner) and not any(isinstance(v, nn.Module) for v in own.values())


def _several(value: Any) -> Sequence[Any]:
    return value if isinstance(value, tuple | list) else [value]


def _inside(container: dict[Any, Any] | tuple[Any, ...] | list[Any] | set[Any]) -> Iterator[object]:
    """The items of a container, nested ones too. A long container is data, and not searched."""
    if isinstance(container, dict):
        items = list(container.values())
    else:
        items = list(container) if len(container) <= _LOOKED_THROUGH else []
    for item in items:
        if isinstance(item, _CONTAINERS):
            yield from _inside(item)
        else:
            yield item


def _named(naming: Naming, kind: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    # A module is callable too, but is not a function of the arguments.
    named = naming(*args, **kwargs) if callable(naming) and kind_of(naming) is None else naming
    several = list(named) if isinstance(named, tuple | list) else [named]
    for one in several:
        if one is not None and kind_of(one) != kind:
            needed = {"model": "Module", "optimizer": "Optimizer", "scheduler": "LRScheduler", "scaler": "GradScaler"}
            raise TypeError(
                f"accumulating({kind}=...) needs a {needed[kind]}, a tuple of them, or a function of the call's "
                f"arguments that returns one, but it gave a {type(one).__name__}."
            )
    return [one for one in several if one is not None]
