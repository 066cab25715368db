"""Which arguments of a call take part, by type or by keyword: models, optimizers, schedulers, a scaler."""

from __future__ import annotations

import dataclasses
import inspect
import weakref
from collections import UserDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from types import MappingProxyType, SimpleNamespace
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from gradsync._errors import GradSyncError
from gradsync.engines import is_engine
from gradsync.functional import bare_optimizer, is_scaling

Call: TypeAlias = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]
"""The user's function, and the arguments of one call. A plain tuple, because a class costs time in each call."""

Naming: TypeAlias = Any | Callable[..., Any] | None
"""An object, a tuple of objects, or a function of the call's arguments; None to search the arguments by type."""

_KINDS = {"model": "Module", "optimizer": "Optimizer", "scheduler": "LRScheduler", "scaler": "GradScaler"}
_DATA = {torch.Tensor, int, float, bool, str, type(None)}  # types that are not searched
_LOOKED_THROUGH = 64  # a sequence among the arguments is searched up to this length; a longer sequence is data


class Participants(NamedTuple):
    """The participants of one call."""

    models: tuple[nn.Module, ...]
    optimizers: tuple[Optimizer, ...]
    schedulers: tuple[Any, ...]
    scaler: torch.amp.GradScaler | None

    def in_words(self) -> dict[str, Any]:
        """What all ranks must have alike, those too whose data has ended and who make the update: names of classes."""
        return {
            "optimizers": [type(bare_optimizer(one)).__name__ for one in self.optimizers],
            "schedulers": [type(one).__name__ for one in self.schedulers],
            "GradScaler": "one" if is_scaling(self.scaler) else "none",
        }


@dataclasses.dataclass(frozen=True, kw_only=True)
class Finder:
    """How a decorated function's participants are found: by these keywords of `accumulating`, or by type."""

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
        if self._by_keyword:
            found = [one for one in found if kind_of(one) not in self._by_keyword]
            for kind, naming in self._by_keyword.items():
                found += _named(naming, kind, args, kwargs)
        return found

    def refuse_hidden(self, found: Sequence[object], args: tuple[Any, ...], kwargs: dict[str, Any], name: str) -> None:
        """Raise for an optimizer, scheduler, scaler or engine in a container among the arguments, unless it is named.

        A bare model in a container is its user's.
        """
        taken = set(map(id, found))
        came = [one for one in (*args, *kwargs.values()) if type(one) not in _DATA and id(one) not in taken]
        if came:
            taken |= {id(inner) for one in found if isinstance(one, nn.Module) for inner in one.modules()}
        for one in came:
            for inner in (one, *inside(one)):
                kind = kind_of(inner)
                is_taken = kind is None or id(inner) in taken or getattr(self, kind) == ()
                if is_taken or (inner is one and kind == "model"):  # which may be a bystander
                    continue
                where = "beside those that are named" if inner is one else f"in {_a(type(one).__name__)}"
                what, harm = f"{kind} ({type(inner).__name__})", "it would be passed over"
                if isinstance(inner, nn.Module):
                    engines = [type(module).__name__ for module in inner.modules() if is_engine(type(module))]
                    if not engines:
                        continue
                    what, harm = engines[0], "each backward would synchronise it, and wait for ranks that have run out"
                raise GradSyncError(
                    f"{name} takes part with what is an argument of its own or named by keyword, but {_a(what)} "
                    f"came {where}, where {harm}. Name it: accumulating(..., {kind}=lambda *args: ...), or leave the "
                    f"keyword {kind} out, and pass each as an argument of its own. With {kind}=() none takes part."
                )

    def refuse_defaults(self, call: Call, name: str) -> None:
        """Raise for an optimizer, scheduler or scaler in the default of a parameter which this call leaves out."""
        function, args, kwargs = call
        try:
            signature = inspect.signature(function, follow_wrapped=False)
            came = signature.bind(*args, **kwargs).arguments
        except (TypeError, ValueError):
            return  # the call itself raises, or it is a function of C
        left = [(one.name, one.default) for one in signature.parameters.values() if one.name not in came]
        for parameter, one in ((name, one) for name, default in left for one in (default, *inside(default))):
            kind = kind_of(one)
            if kind not in {None, "model"} and getattr(self, str(kind)) is None:
                raise GradSyncError(
                    f"{name} takes part with what is an argument of its own or named by keyword, but {_a(str(kind))} "
                    f"({type(one).__name__}) comes with the default of {parameter!r}, where it would be "
                    f"passed over. Pass it in the call, or name it: accumulating(..., {kind}=...)."
                )

    def known(self) -> bool:
        """Whether models and optimizers are named as objects, and all that is named is: known before any call."""
        named = [one for one in (self.model, self.optimizer, self.scheduler, self.scaler) if one is not None]
        objects = all(isinstance(one, tuple | nn.Module) or not callable(one) for one in named)
        return objects and self.model is not None and self.optimizer is not None

    @cached_property
    def _by_keyword(self) -> dict[str, Naming]:
        """The kinds that are named by keyword."""
        return {kind: naming for kind in _KINDS if (naming := getattr(self, kind)) is not None}


def participants_of(found: Sequence[Any], came: Sequence[object], name: str, *, is_method: bool) -> Participants:
    """The participants, sorted by kind.

    Raises unless there is a model and an optimizer among what `came`, and schedulers move these optimizers.
    """
    # An object of no known kind was named by the keyword `scheduler`.
    kinds = [(one, kind_of(one) or "scheduler") for one in found]
    models, optimizers, schedulers, scalers = (
        tuple({id(one): one for one, own in kinds if own == kind}.values()) for kind in _KINDS
    )
    if len(scalers) > 1:
        raise GradSyncError("A call needs one GradScaler at most, but two came. Name one with scaler=...")
    for several, what in ((models, "model"), (optimizers, "optimizer")):
        if not several:
            how = f"lambda self, *_: self.{what}" if is_method else what
            raise GradSyncError(
                f"{name} needs {_a(what)} among its arguments, but found none. What "
                f"came is {', '.join(type(one).__name__ for one in came) or 'nothing'}. Pass it to the function as an "
                f"argument of its own, or name it: accumulating(..., {what}={how})."
            )
    for scheduler in schedulers:
        theirs = moved_by(scheduler)
        if theirs and cores(theirs).isdisjoint(cores(optimizers)):
            raise GradSyncError(
                f"A scheduler moves an optimizer that {name} steps, but the {type(scheduler).__name__} that came moves "
                f"another {type(theirs[0]).__name__}. Make the scheduler anew from the optimizer that the call has, or "
                "keep it out of the call."
            )
    return Participants(models, optimizers, schedulers, scalers[0] if scalers else None)


def _a(what: str) -> str:
    return f"{'an' if what[0] in 'aeiouAEIOU' else 'a'} {what}"


def reference(one: Any) -> Callable[[], Any]:
    """A function that returns the object, and does not keep it alive if it can be referenced weakly."""
    try:
        return weakref.ref(one)
    except TypeError:
        return lambda: one  # it has __slots__, or is None


def _named(naming: Naming, kind: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """What a keyword names."""
    named = naming
    if callable(naming) and not isinstance(naming, type) and not _fits(naming, kind):  # a module is callable too
        named = naming(*args, **kwargs)
    several = [one for one in (named if isinstance(named, tuple | list) else [named]) if one is not None]
    for one in several:
        if not _fits(one, kind):
            came = f"got the class {one.__name__}" if isinstance(one, type) else f"it gave a {type(one).__name__}"
            raise TypeError(
                f"accumulating({kind}=...) needs a {_KINDS[kind]}, a tuple of them, or a function of the call's "
                f"arguments that returns one, but {came}."
            )
    return several


def _fits(one: object, kind: str) -> bool:
    """Whether an object that a keyword names is of that kind; a scheduler need only have a `step`."""
    own = kind_of(one)
    if own is None and kind == "scheduler" and not isinstance(one, type):
        return callable(getattr(one, "step", None))
    return own == kind


# -- kinds ------------------------------------------------------------------------------------------------------------


def kind_of(one: object) -> str | None:
    """The kind of participant that an object is, or None. A scheduler has a `step` and the optimizer that it moves."""
    if isinstance(one, nn.Module):
        return "model"
    if isinstance(one, Optimizer):
        return "optimizer"
    if isinstance(one, torch.amp.GradScaler):
        return "scaler"
    return "scheduler" if isinstance(one, LRScheduler) or _moves(one) else None


def moved_by(scheduler: object) -> list[Optimizer]:
    """The optimizers that are attributes of a scheduler."""
    found: list[Optimizer] = []
    for one in _held_by(scheduler):
        if isinstance(one, Optimizer):
            found.append(one)
        elif isinstance(one, LRScheduler):
            found += moved_by(one)
    return found


def cores(optimizers: Iterable[object]) -> set[int]:
    """The ids of optimizers and of the optimizers inside them."""
    found: set[int] = set()
    todo = list(optimizers)
    while todo:
        one = todo.pop()
        if id(one) not in found:
            found.add(id(one))
            todo += [inner for inner in vars(one).values() if isinstance(inner, Optimizer)]
    return found


def inside(container: object, seen: set[int] | None = None) -> Iterator[object]:
    """The items of a container, nested ones too. A long sequence is data, and not searched."""
    seen = set() if seen is None else seen
    items = _items(container)
    if items is None or id(container) in seen:
        return
    seen.add(id(container))
    for item in items:
        if _items(item) is None or has_step(item):
            yield item
        else:
            yield from inside(item, seen)


def _items(container: object) -> list[Any] | None:
    """The items of a container; None if the object is no container."""
    if isinstance(container, dict | UserDict | MappingProxyType):
        return list(container.values())
    if isinstance(container, tuple | list | set | frozenset | deque):
        return list(container) if len(container) <= _LOOKED_THROUGH else []
    if isinstance(container, SimpleNamespace):
        return list(vars(container).values())
    if dataclasses.is_dataclass(container) and not isinstance(container, type):
        return [getattr(container, one.name, None) for one in dataclasses.fields(container)]
    return None


def _moves(one: object) -> bool:
    """Whether it has a step and an optimizer (schedulers of timm, Accelerate), and no model (a trainer)."""
    if isinstance(one, type) or not has_step(one):
        return False
    held = _held_by(one)
    moves = any(isinstance(value, Optimizer | LRScheduler) for value in held)
    return moves and not any(isinstance(value, nn.Module) for value in held)


def has_step(one: object) -> bool:
    """Whether it can be stepped; no code of the user's runs."""
    return callable(getattr(one, "__dict__", {}).get("step", getattr(type(one), "step", None)))


def attributes_of(one: object) -> list[Any]:
    """The values of an object's attributes, those in `__slots__` too."""
    values = [*getattr(one, "__dict__", {}).values()]
    for slots in [kind.__dict__.get("__slots__", ()) for kind in type(one).__mro__]:
        names = [slots] if isinstance(slots, str) else slots
        values += [getattr(one, name, None) for name in names if name not in {"__dict__", "__weakref__"}]
    return values


def _held_by(one: object) -> list[Any]:
    """The values of an object's attributes, and the items of those that are containers."""
    return [each for value in attributes_of(one) for each in (value, *inside(value))]
