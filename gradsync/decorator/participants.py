"""Finds the participants of a call (models, optimizers, schedulers, scaler), by type or by keyword."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import nn
from torch.optim import Optimizer

from gradsync._errors import GradSyncError
from gradsync.decorator.kinds import cores, inside, kind_of, moved_by
from gradsync.engines import is_engine

Naming: TypeAlias = Any | Callable[..., Any] | None
"""An object, a tuple of objects, or a function of the call's arguments; None to search the arguments by type."""


class Participants(NamedTuple):
    """The participants of one call."""

    models: tuple[nn.Module, ...]
    optimizers: tuple[Optimizer, ...]
    schedulers: tuple[Any, ...]
    scaler: torch.amp.GradScaler | None


@dataclass(frozen=True)
class Finder:
    """How a decorated function's participants are found."""

    model: Naming = None
    optimizer: Naming = None
    scheduler: Naming = None
    scaler: Naming = None

    def find(self, instance: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        """All participants of a call with these arguments, in a fixed order, for a quick comparison.

        The instance of a method may be a model; a trainer that has a `step` and optimizers is no scheduler.
        """
        came = (*args, *kwargs.values()) if kwargs else args
        found = [one for one in came if type(one) not in _DATA and kind_of(one) is not None]
        if instance is not None:
            args = (instance, *args)
            if isinstance(instance, nn.Module):
                found.insert(0, instance)
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

    def refuse_hidden(self, found: Sequence[object], args: tuple[Any, ...], kwargs: dict[str, Any], name: str) -> None:
        """Raise for an optimizer, scheduler or scaler in a container among the arguments, unless it is named."""
        taken = set(map(id, found))
        came = [one for one in (*args, *kwargs.values()) if type(one) not in _DATA and id(one) not in taken]
        if came:
            taken |= {id(inner) for one in found if isinstance(one, nn.Module) for inner in one.modules()}
        for one in came:
            for inner in inside(one):
                kind = kind_of(inner)
                if kind is None or id(inner) in taken or getattr(self, kind) == ():
                    continue
                if isinstance(inner, nn.Module):
                    _refuse_hidden_engine(inner, one, name)
                else:
                    raise GradSyncError(
                        f"{name} takes part with what is an argument of its own or named by keyword, but a {kind} "
                        f"({type(inner).__name__}) came in a {type(one).__name__}, where it would be passed over. Pass "
                        f"it as an argument, or name it: accumulating(..., {kind}=lambda *args: ...). With {kind}=() "
                        "none takes part."
                    )

    def known(self) -> bool:
        """Whether models and optimizers are objects, known before any call."""
        return all(
            one is not None and (isinstance(one, tuple | nn.Module) or not callable(one))
            for one in (self.model, self.optimizer)
        )

    @cached_property
    def _by_type(self) -> bool:
        return self.model is self.optimizer is self.scheduler is self.scaler is None


_KINDS = ("model", "optimizer", "scheduler", "scaler")
_DATA = {torch.Tensor, int, float, bool, str, type(None)}  # types that are not searched


def participants_of(found: Sequence[Any]) -> Participants:
    """The participants, sorted by kind."""
    # An object of no known kind was named by the keyword `scheduler`.
    kinds = [(one, kind_of(one) or "scheduler") for one in found]
    models, optimizers, schedulers, scalers = (
        tuple({id(one): one for one, own in kinds if own == kind}.values()) for kind in _KINDS
    )
    if len(scalers) > 1:
        raise GradSyncError("A call needs one GradScaler at most, but two came. Name one with scaler=...")
    return Participants(models, optimizers, schedulers, scalers[0] if scalers else None)


def reference(one: Any) -> Callable[[], Any]:
    """A function that returns the object, and does not keep it alive if it can be referenced weakly."""
    try:
        return weakref.ref(one)
    except TypeError:
        return lambda: one  # it has __slots__, or is None


def check_complete(participants: Participants, name: str, came: Sequence[object], *, is_method: bool) -> None:
    """Raise unless there is a model and an optimizer, and schedulers move these optimizers. `came`: the arguments."""
    for several, what in ((participants.models, "model"), (participants.optimizers, "optimizer")):
        if not several:
            how = f"lambda self, *_: self.{what}" if is_method else what
            raise GradSyncError(
                f"{name} needs a{'n' if what == 'optimizer' else ''} {what} among its arguments, but found none. What "
                f"came is {', '.join(type(one).__name__ for one in came) or 'nothing'}. Pass it to the function as an "
                f"argument of its own, or name it: accumulating(..., {what}={how})."
            )
    for scheduler in participants.schedulers:
        theirs = moved_by(scheduler)
        if theirs and cores(theirs).isdisjoint(cores(participants.optimizers)):
            raise GradSyncError(
                f"A scheduler moves an optimizer that {name} steps, but the {type(scheduler).__name__} that came moves "
                f"another {type(theirs[0]).__name__}. Make the scheduler anew from the optimizer that the call has, or "
                "keep it out of the call."
            )


def _refuse_hidden_engine(model: nn.Module, container: object, name: str) -> None:
    """A bare model in a container is its user's; one on an engine would synchronise in each backward."""
    on = next((type(module).__name__ for module in model.modules() if is_engine(type(module))), None)
    if on is not None:
        raise GradSyncError(
            f"{name} holds the models back that are arguments of their own or named by keyword, but a {on} came in a "
            f"{type(container).__name__}, where each backward would synchronise it, and ranks that run out would be "
            "waited for. Pass it as an argument, or name it: accumulating(..., model=lambda *args: ...)."
        )


def _named(naming: Naming, kind: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    if isinstance(naming, type):
        raise TypeError(
            f"accumulating({kind}=...) needs an object or a function of the call's arguments, but got the class "
            f"{naming.__name__}. Pass the object that was made of it."
        )
    # A module is callable too, but is not a function of the arguments.
    named = naming(*args, **kwargs) if callable(naming) and not _fits(naming, kind) else naming
    several = list(named) if isinstance(named, tuple | list) else [named]
    for one in several:
        if one is not None and not _fits(one, kind):
            needed = {"model": "Module", "optimizer": "Optimizer", "scheduler": "LRScheduler", "scaler": "GradScaler"}
            raise TypeError(
                f"accumulating({kind}=...) needs a {needed[kind]}, a tuple of them, or a function of the call's "
                f"arguments that returns one, but it gave a {type(one).__name__}."
            )
    return [one for one in several if one is not None]


def _fits(one: object, kind: str) -> bool:
    """Whether an object that a keyword names is of that kind; a scheduler need only have a `step`."""
    own = kind_of(one)
    return own == kind or (own is None and kind == "scheduler" and callable(getattr(one, "step", None)))
