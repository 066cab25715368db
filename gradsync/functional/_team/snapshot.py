"""`Snapshot`: the parameters and wrappers of models and optimizers at one moment, to compare with another."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
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


class _Parameter(NamedTuple):
    """What an engine minds of a parameter. A lazy one has no dtype, device and shape: it gets them later."""

    parameter: nn.Parameter
    dtype: Any
    device: Any
    shape: Any
    trainable: bool


@dataclass(frozen=True, eq=False)
class Snapshot:
    """The models and optimizers of a step at one moment, to be compared with another.

    It refers to parameters, not to modules, and so does not keep a model alive.
    """

    parameters: Sequence[_Parameter]
    num_inside: int  # how many of these, from the first, are in a model
    trained: frozenset[int]
    owned: Sequence[int]  # the ids of the optimizers' parameters
    roots: Sequence[int]  # the ids of the models
    modules: Sequence[_Module]  # all modules in them
    kinds: Collection[type]  # the classes of these
    wrappers: Sequence[tuple[int, int]]  # places and ids of the modules that an engine is made for
    emptied: Sequence[int]  # the ids of the modules whose parameters an engine has put into others
    group: object  # the default process group
    world: object  # the default process group if it has several ranks, else None

    @classmethod
    def of(
        cls,
        models: Sequence[nn.Module],
        optimizers: Sequence[Optimizer],
        trained: frozenset[int],
        gathered: Gathered = NOTHING,
        *,
        emptied: Collection[nn.Module] = (),
    ) -> Snapshot:
        """The snapshot now.

        `trained` has the ids of the parameters for which it matters whether they are frozen: not those of bystanders.
        `gathered` has what stands in modules in place of parameters, with these. `emptied` has the modules whose
        parameters an engine has put into others: it minds if these are others, or elsewhere.
        """
        every = [module for model in models for module in model.modules()]
        theirs = [tuple(_parameters_of(module, gathered)) for module in every]
        found = dict.fromkeys(one for parameters in theirs for one in parameters if one is not None)
        mine = owned(optimizers)
        return cls(
            parameters=[_likeness(one, trained) for one in dict.fromkeys((*found, *mine))],
            num_inside=len(found),
            trained=trained,
            owned=[*map(id, mine)],
            roots=[*map(id, models)],
            modules=[*map(_Module.of, every, theirs)],
            kinds={*map(type, every)},
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
        now = Snapshot.of(models, optimizers, self.trained, gathered, emptied=emptied())
        return None if self._is_like(now) else self._difference(now)

    def _is_still(  # noqa: PLR0911 - quick: nothing is looked at after the first difference
        self, models: Sequence[nn.Module], optimizers: Sequence[Optimizer], gathered: Gathered
    ) -> bool:
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
        trained = self.trained
        for parameter, dtype, device, shape, trainable in self.parameters:
            if parameter.dtype is not dtype or parameter.shape != shape or parameter.device != device:
                return False
            if trainable != (parameter.requires_grad and id(parameter) in trained):
                return False
        return True

    def _is_like(self, other: Snapshot) -> bool:
        return (
            len(self.parameters) == len(other.parameters)
            and all(map(_is_like, self.parameters, other.parameters))
            and self.num_inside == other.num_inside
            and self.owned == other.owned
            and self.kinds == other.kinds
            and self.wrappers == other.wrappers
            and self.emptied == other.emptied
            and self.world is other.world
        )

    def _difference(self, other: Snapshot) -> str:
        mine, theirs = ({id(one.parameter): one for one in snapshot.parameters} for snapshot in (self, other))
        both = [(mine[key], theirs[key]) for key in mine.keys() & theirs.keys()]
        numbers = {
            "parameters are new": len(theirs.keys() - mine.keys()),
            "are gone": len(mine.keys() - theirs.keys()),
            "were frozen or unfrozen": sum(a.trainable != b.trainable for a, b in both),
            "changed their dtype, device or shape": sum(
                a.trainable == b.trainable and not _is_like(a, b) for a, b in both
            ),
        }
        told = [f"{number} {words}" for words, number in numbers.items() if number]
        if self.emptied != other.emptied:
            told.append("layers whose parameters are in flat ones were taken out, replaced or moved")
        return ", ".join(told) or "the optimizers' parameters or the wrappers are others"


def _parameters_of(module: nn.Module, gathered: Gathered) -> Collection[nn.Parameter | None]:
    found = module._parameters
    if not gathered:
        return found.values()
    own = {name: p if p is None else gathered.get(p, p) for name, p in found.items()}
    beside = ((name, one) for name, one in vars(module).items() if isinstance(one, torch.Tensor))
    own.update((name, gathered[one]) for name, one in beside if one in gathered)
    return own.values()


def _likeness(parameter: nn.Parameter, trained: frozenset[int]) -> _Parameter:
    trainable = parameter.requires_grad and id(parameter) in trained
    if is_lazy(parameter):
        return _Parameter(parameter, None, None, None, trainable)
    return _Parameter(parameter, parameter.dtype, parameter.device, parameter.shape, trainable)


def _is_like(then: _Parameter, now: _Parameter) -> bool:
    if then.parameter is not now.parameter or then.trainable != now.trainable:
        return False
    return then.dtype is None or then[1:4] == now[1:4]
