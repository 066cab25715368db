"""Tells models, optimizers, schedulers and scalers apart, and finds the optimizers that a scheduler moves."""

from __future__ import annotations

import dataclasses
from collections import UserDict, deque
from collections.abc import Iterable, Iterator
from types import MappingProxyType, SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

_LOOKED_THROUGH = 64  # a sequence among the arguments is searched up to this length; a longer sequence is data


def kind_of(one: object) -> str | None:
    """As what an object takes part; None if it does not. A scheduler has a `step` and the optimizer that it moves."""
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
        if _items(item) is None or _has_step(item):
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
    if isinstance(one, type) or not _has_step(one):
        return False
    held = _held_by(one)
    moves = any(isinstance(value, Optimizer | LRScheduler) for value in held)
    return moves and not any(isinstance(value, nn.Module) for value in held)


def _has_step(one: object) -> bool:
    own = getattr(one, "__dict__", {})
    return callable(own.get("step", getattr(type(one), "step", None)))


def _held_by(one: object) -> list[Any]:
    """The values of an object's attributes, and the items of those that are containers."""
    names = [name for kind in type(one).__mro__ for name in _names(kind.__dict__.get("__slots__", ()))]
    slots = [getattr(one, name, None) for name in names if name not in {"__dict__", "__weakref__"}]
    held = []
    for value in [*getattr(one, "__dict__", {}).values(), *slots]:
        held += [value] if isinstance(value, Optimizer | nn.Module | LRScheduler) else [value, *inside(value)]
    return held


def _names(slots: Any) -> tuple[str, ...]:
    return (slots,) if isinstance(slots, str) else tuple(slots)
