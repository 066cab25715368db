"""`ModelsAsTheyWere`: the parameters and wrappers of models and optimizers at one moment, to compare with another."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from operator import attrgetter
from types import MappingProxyType
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from gradsync.engines import is_engine
from gradsync.functional._update.optimizers import owned
from gradsync.ranks.group import several_ranks

Gathered: TypeAlias = Mapping[torch.Tensor, nn.Parameter]

NONE_GATHERED: Gathered = MappingProxyType({})
_Parameters: TypeAlias = Mapping[str, nn.Parameter | None]

_PARAMETERS, _CHILDREN = attrgetter("_parameters"), attrgetter("_modules")  # for `map`, which is faster than a loop


# What matters to an engine: of a trained parameter, and of a bystander's parameter.
_FORM = attrgetter("requires_grad", "dtype", "device", "shape")
_FORM_BESIDE = attrgetter("dtype", "device", "shape")


class ModelsAsTheyWere:
    """The models and optimizers of a step at one moment, to be compared with another.

    It refers to parameters, not to modules, and so does not keep a model alive.
    """

    def __init__(
        self,
        models: Sequence[nn.Module],
        optimizers: Sequence[Optimizer],
        ids: frozenset[int],
        gathered: Gathered = NONE_GATHERED,
        *,
        emptied: Collection[nn.Module] = (),
    ) -> None:
        """The snapshot now.

        `ids` has those of the parameters for which it matters whether they are frozen: not those of bystanders.
        `gathered` has what stands in modules in place of parameters, with these. `emptied` has the modules whose
        parameters an engine has put into others: to replace or move one of these is a change.
        """
        every = [module for model in models for module in model.modules()]
        theirs = _parameters_of(every, gathered)
        found = dict.fromkeys(one for parameters in theirs for one in parameters.values() if one is not None)
        mine = owned(optimizers)
        both = dict.fromkeys((*found, *mine))
        self._ids = ids
        self._trained = [one for one in both if id(one) in ids]
        self._beside = [one for one in both if id(one) not in ids]  # of bystanders
        self._has_lazy = any(map(is_lazy, both))
        # Of a lazy one only the beginning: it gets the rest later.
        self._forms: list[tuple[Any, ...]] = [(p.requires_grad,) if is_lazy(p) else _FORM(p) for p in self._trained]
        self._forms += [() if is_lazy(p) else _FORM_BESIDE(p) for p in self._beside]
        self._owned = [*map(id, mine)]
        self._roots = [*map(id, models)]
        # The modules, and the ids of what is in them: while these live, no id is used again.
        self._modules = [*map(weakref.ref, every)]
        self._kinds = [*map(type, every)]
        self._inside = _inside(every, theirs)
        self._emptied = [id(module) for module in every if module in emptied]
        self._group = dist.group.WORLD
        # What else an engine minds: the order of parameters, which are in a model, classes, wrappers, several ranks.
        self._rest = (
            [*map(id, (*self._trained, *self._beside))],
            len(found),
            self._owned,
            {*map(_kind, every)},
            [(place, id(module)) for place, module in enumerate(every) if is_engine(type(module))],
            dist.group.WORLD if several_ranks() else None,
        )

    def change(
        self,
        models: Sequence[nn.Module],
        optimizers: Sequence[Optimizer],
        emptied: Callable[[], Collection[nn.Module]],
        gathered: Gathered = NONE_GATHERED,
    ) -> str | None:
        """What has changed since then, in words; None if nothing that matters to an engine."""
        if self._is_still(models, optimizers, gathered):
            return None
        return self._difference(ModelsAsTheyWere(models, optimizers, self._ids, gathered, emptied=emptied())) or None

    def _is_still(self, models: Sequence[nn.Module], optimizers: Sequence[Optimizer], gathered: Gathered) -> bool:
        """Whether nothing at all has changed (quick)."""
        if self._roots != [*map(id, models)]:
            return False
        mine = [id(parameter) for one in optimizers for group in one.param_groups for parameter in group["params"]]
        if mine != self._owned or self._group is not dist.group.WORLD:
            return False
        every: list[Any] = [ref() for ref in self._modules]
        if [*map(type, every)] != self._kinds or _inside(every, _parameters_of(every, gathered)) != self._inside:
            return False
        return not self._has_lazy and [*map(_FORM, self._trained), *map(_FORM_BESIDE, self._beside)] == self._forms

    def _difference(self, other: ModelsAsTheyWere) -> str:
        """What an engine minds of the difference, in words; empty if nothing."""
        mine, theirs = self._by_id(), other._by_id()
        both = [key for key in mine.keys() & theirs.keys() if not _is_alike(mine[key], theirs[key])]
        switched = sum(key in self._ids and mine[key][0] != theirs[key][0] for key in both)
        numbers = {
            "new parameters": len(theirs.keys() - mine.keys()),
            "parameters gone": len(mine.keys() - theirs.keys()),
            "frozen or unfrozen": switched,
            "of another dtype, device or shape": len(both) - switched,
        }
        told = [f"{words}: {number}" for words, number in numbers.items() if number]
        if self._emptied != other._emptied:
            told.append("layers whose parameters are in flat ones were taken out, replaced or moved")
        if not told and self._rest != other._rest:
            told.append("the optimizers' parameters or the wrappers are others")
        return ", ".join(told)

    def _by_id(self) -> dict[int, tuple[Any, ...]]:
        return dict(zip(map(id, (*self._trained, *self._beside)), self._forms, strict=True))


def _inside(every: Sequence[nn.Module], theirs: Sequence[_Parameters]) -> list[list[int]]:
    """The ids of the modules' parameters and children, and how many of both each has. Flat lists are made faster."""
    children = [*map(_CHILDREN, every)]
    return [
        [id(one) for parameters in theirs for one in parameters.values()],
        [id(one) for modules in children for one in modules.values()],
        [*map(len, theirs)],
        [*map(len, children)],
    ]


def _parameters_of(every: Sequence[nn.Module], gathered: Gathered) -> list[_Parameters]:
    """The parameters of each module, by name."""
    if not gathered:
        return [*map(_PARAMETERS, every)]
    found: list[_Parameters] = []
    for module in every:
        own = {name: p if p is None else gathered.get(p, p) for name, p in module._parameters.items()}
        beside = ((name, one) for name, one in vars(module).items() if isinstance(one, torch.Tensor))
        own.update((name, gathered[one]) for name, one in beside if one in gathered)
        found.append(own)
    return found


def _kind(module: nn.Module) -> type:
    """The class of a module. For a lazy module, the class that its first forward gives it."""
    kind: type = getattr(module, "cls_to_become", None) or type(module)
    return kind


def _is_alike(then: tuple[Any, ...], now: tuple[Any, ...]) -> bool:
    return then == now[: len(then)]
