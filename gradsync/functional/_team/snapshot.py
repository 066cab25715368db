"""`Snapshot`: the parameters and wrappers of models and optimizers at one moment, to compare with another."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from operator import attrgetter
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parameter import is_lazy

from gradsync.engines import is_engine
from gradsync.functional._update.optimizers import owned
from gradsync.ranks.group import several_ranks

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
    from typing import TypeAlias

    from torch.optim import Optimizer

    Gathered: TypeAlias = Mapping[torch.Tensor, nn.Parameter]

NOTHING: Gathered = MappingProxyType({})


class _Module(NamedTuple):
    """A module, the ids of its parameters and of its children. While these live, no id is used again."""

    ref: weakref.ref[nn.Module]
    kind: type
    parameters: list[int]
    children: list[int]

    @classmethod
    def of(cls, module: nn.Module, parameters: Iterable[nn.Parameter | None]) -> _Module:
        children = map(id, module._modules.values())
        return cls(weakref.ref(module), type(module), [*map(id, parameters)], [*children])


# What an engine minds of a parameter: of one that is trained, and of a bystander's.
_FORM = attrgetter("requires_grad", "dtype", "device", "shape")
_FORM_BESIDE = attrgetter("dtype", "device", "shape")


@dataclass(frozen=True, eq=False)
class Snapshot:
    """The models and optimizers of a step at one moment, to be compared with another.

    It refers to parameters, not to modules, and so does not keep a model alive.
    """

    trained: Sequence[nn.Parameter]
    beside: Sequence[nn.Parameter]  # bystanders'
    forms: Sequence[tuple[Any, ...]]  # of both; of a lazy one only the beginning, for it gets the rest later
    has_lazy: bool
    num_inside: int  # how many of all these are in a model
    ids: frozenset[int]  # of those for which it matters whether they are frozen
    owned: Sequence[int]  # the ids of the optimizers' parameters
    roots: Sequence[int]  # the ids of the models
    modules: Sequence[_Module]  # all modules in them
    kinds: Collection[type]  # the classes of these; of a lazy one what it becomes
    wrappers: Sequence[tuple[int, int]]  # places and ids of the modules that an engine is made for
    emptied: Sequence[int]  # the ids of the modules whose parameters an engine has put into others
    group: object  # the default process group
    world: object  # the default process group if it has several ranks, else None

    @classmethod
    def of(
        cls,
        models: Sequence[nn.Module],
        optimizers: Sequence[Optimizer],
        ids: frozenset[int],
        gathered: Gathered = NOTHING,
        *,
        emptied: Collection[nn.Module] = (),
    ) -> Snapshot:
        """The snapshot now.

        `ids` has those of the parameters for which it matters whether they are frozen: not those of bystanders.
        `gathered` has what stands in modules in place of parameters, with these. `emptied` has the modules whose
        parameters an engine has put into others: it minds if these are others, or elsewhere.
        """
        every = [module for model in models for module in model.modules()]
        theirs = [tuple(_parameters_of(module, gathered)) for module in every]
        found = dict.fromkeys(one for parameters in theirs for one in parameters if one is not None)
        mine = owned(optimizers)
        both = dict.fromkeys((*found, *mine))
        trained = [one for one in both if id(one) in ids]
        beside = [one for one in both if id(one) not in ids]
        return cls(
            trained=trained,
            beside=beside,
            forms=[
                *((one.requires_grad,) if is_lazy(one) else _FORM(one) for one in trained),
                *(() if is_lazy(one) else _FORM_BESIDE(one) for one in beside),
            ],
            has_lazy=any(map(is_lazy, both)),
            num_inside=len(found),
            ids=ids,
            owned=[*map(id, mine)],
            roots=[*map(id, models)],
            modules=[*map(_Module.of, every, theirs)],
            kinds={*map(_kind, every)},
            wrappers=[
                (place, id(module))
                for model in models
                for place, module in enumerate(model.modules())
                if is_engine(type(module))
            ],
            emptied=[id(module) for module in every if module in emptied],
            group=dist.group.WORLD,
            world=dist.group.WORLD if several_ranks() else None,
        )

    def change(
        self,
        models: Sequence[nn.Module],
        optimizers: Sequence[Optimizer],
        emptied: Callable[[], Collection[nn.Module]],
        gathered: Gathered = NOTHING,
    ) -> str | None:
        """What has changed since then, in words; None if nothing that matters to an engine."""
        if self._is_still(models, optimizers, gathered):
            return None
        now = Snapshot.of(models, optimizers, self.ids, gathered, emptied=emptied())
        return None if self._is_like(now) else self._difference(now)

    def _is_still(self, models: Sequence[nn.Module], optimizers: Sequence[Optimizer], gathered: Gathered) -> bool:
        """Whether nothing at all has changed (quick)."""
        if self.roots != [*map(id, models)]:
            return False
        mine = [id(parameter) for one in optimizers for group in one.param_groups for parameter in group["params"]]
        if mine != self.owned or self.group is not dist.group.WORLD:
            return False
        for ref, kind, parameters, children in self.modules:
            module = ref()
            if module is None or type(module) is not kind:
                return False
            found = _parameters_of(module, gathered) if gathered else module._parameters.values()
            if [*map(id, found)] != parameters or [*map(id, module._modules.values())] != children:
                return False
        return not self.has_lazy and [*map(_FORM, self.trained), *map(_FORM_BESIDE, self.beside)] == self.forms

    def _is_like(self, other: Snapshot) -> bool:
        return (
            [*map(id, self.trained)] == [*map(id, other.trained)]
            and [*map(id, self.beside)] == [*map(id, other.beside)]
            and all(map(_is_alike, self.forms, other.forms))
            and self.num_inside == other.num_inside
            and self.owned == other.owned
            and self.kinds == other.kinds
            and self.wrappers == other.wrappers
            and self.emptied == other.emptied
            and self.world is other.world
        )

    def _difference(self, other: Snapshot) -> str:
        mine, theirs = self._by_id(), other._by_id()
        both = [key for key in mine.keys() & theirs.keys() if not _is_alike(mine[key], theirs[key])]
        switched = sum(key in self.ids and mine[key][0] != theirs[key][0] for key in both)
        numbers = {
            "parameters are new": len(theirs.keys() - mine.keys()),
            "are gone": len(mine.keys() - theirs.keys()),
            "were frozen or unfrozen": switched,
            "changed their dtype, device or shape": len(both) - switched,
        }
        told = [f"{number} {words}" for words, number in numbers.items() if number]
        if self.emptied != other.emptied:
            told.append("layers whose parameters are in flat ones were taken out, replaced or moved")
        return ", ".join(told) or "the optimizers' parameters or the wrappers are others"

    def _by_id(self) -> dict[int, tuple[Any, ...]]:
        return dict(zip(map(id, (*self.trained, *self.beside)), self.forms, strict=True))


def _parameters_of(module: nn.Module, gathered: Gathered) -> Collection[nn.Parameter | None]:
    found = module._parameters
    if not gathered:
        return found.values()
    own = {name: p if p is None else gathered.get(p, p) for name, p in found.items()}
    beside = ((name, one) for name, one in vars(module).items() if isinstance(one, torch.Tensor))
    own.update((name, gathered[one]) for name, one in beside if one in gathered)
    return own.values()


def _kind(module: nn.Module) -> type:
    """The class of a module; of a lazy one that which it gets in its first forward."""
    kind: type = getattr(module, "cls_to_become", None) or type(module)
    return kind


def _is_alike(then: tuple[Any, ...], now: tuple[Any, ...]) -> bool:
    return then == now[: len(then)]
