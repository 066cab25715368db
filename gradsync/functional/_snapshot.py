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
from gradsync.ranks.group import several_ranks

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence
    from typing import TypeAlias

    from torch.optim import Optimizer

    Gathered: TypeAlias = Mapping[torch.Tensor, nn.Parameter]

_Parameter = tuple[Any, ...]
NOTHING: Gathered = MappingProxyType({})


class _Module(NamedTuple):
    """A module, the ids of its parameters and of its children. While these live, no id is used again."""

    ref: weakref.ref[nn.Module]
    kind: type
    parameters: list[int]
    children: list[int]


@dataclass(frozen=True, eq=False)
class Snapshot:
    """The models and optimizers of a step at one moment, to be compared with another.

    It refers to parameters, not to modules, and so does not keep a model alive.
    """

    models: Sequence[_Parameter]
    num_inside: int  # how many of these, from the first, are in a model
    owned: Sequence[nn.Parameter]
    owned_ids: Sequence[int]
    roots: Sequence[int]  # the ids of the models
    modules: Sequence[_Module]  # all modules in them
    wrappers: Sequence[int]  # places and ids of the modules that an engine is made for
    emptied: Sequence[int]  # the ids of the modules whose parameters an engine has put into others
    kinds: Mapping[type, bool]  # the classes of all modules, and whether an engine is made for each
    group: object  # the default process group
    world: object  # the default process group if it has several ranks, else None

    @classmethod
    def of(
        cls,
        models: Iterable[nn.Module],
        owned: Iterable[nn.Parameter],
        trained: frozenset[int],
        before: Snapshot | None = None,
        gathered: Gathered = NOTHING,
        *,
        emptied: Collection[nn.Module] = (),
    ) -> Snapshot:
        """The snapshot now. `before` spares looking up the same classes again.

        `trained` has the ids of the parameters for which it matters whether they are frozen: not those of bystanders.
        `gathered` has what stands in modules in place of parameters, with these. `emptied` has the modules whose
        parameters an engine has put into others: it minds if these are others, or elsewhere.
        """
        found: dict[nn.Parameter, None] = {}
        roots: list[int] = []
        modules: list[_Module] = []
        wrappers: list[int] = []
        hollow: list[int] = []
        kinds: dict[type, bool] = {} if before is None else dict(before.kinds)
        seen: dict[type, None] = {}
        for model in models:
            roots.append(id(model))
            for place, module in enumerate(model.modules()):
                kind = type(module)
                seen[kind] = None
                wraps = kinds.get(kind)
                if wraps is None:
                    wraps = kinds[kind] = is_engine(kind)
                if wraps:
                    wrappers += [place, id(module)]
                if module in emptied:
                    hollow.append(id(module))
                parameters = tuple(_parameters_of(module, gathered))
                inner = map(id, module._modules.values())
                modules.append(_Module(weakref.ref(module), kind, [*map(id, parameters)], [*inner]))
                for parameter in parameters:
                    if parameter is not None:
                        found[parameter] = None
        mine = tuple(owned)
        alike = tuple(_likeness(p, trained) for p in dict.fromkeys((*found, *mine)))
        group = dist.group.WORLD
        kinds = {kind: kinds[kind] for kind in seen}
        return cls(
            models=alike,
            num_inside=len(found),
            owned=mine,
            owned_ids=[*map(id, mine)],
            roots=roots,
            modules=modules,
            wrappers=wrappers,
            emptied=hollow,
            kinds=kinds,
            group=group,
            world=group if several_ranks() else None,
        )

    def is_still(  # noqa: PLR0911 - quick: nothing is looked at after the first difference
        self,
        models: Sequence[nn.Module],
        optimizers: Sequence[Optimizer],
        trained: frozenset[int],
        gathered: Gathered = NOTHING,
    ) -> bool:
        """Whether nothing at all has changed (quick). `is_like` ignores changes that no engine minds."""
        if self.roots != [*map(id, models)]:
            return False
        mine = [id(parameter) for one in optimizers for group in one.param_groups for parameter in group["params"]]
        if mine != self.owned_ids or self.group is not dist.group.WORLD:
            return False
        for ref, kind, parameters, children in self.modules:
            module = ref()
            if module is None or type(module) is not kind:
                return False
            found = _parameters_of(module, gathered) if gathered else module._parameters.values()
            if [*map(id, found)] != parameters or [*map(id, module._modules.values())] != children:
                return False
        for parameter, dtype, device, shape, trainable in self.models:
            if parameter.dtype is not dtype or parameter.shape != shape or parameter.device != device:
                return False
            if trainable != (parameter.requires_grad and id(parameter) in trained):
                return False
        return True

    def is_like(self, other: Snapshot) -> bool:
        """Whether nothing has changed that matters to an engine."""
        return (
            len(self.models) == len(other.models)
            and self.num_inside == other.num_inside
            and all(map(_alike, self.models, other.models))
            and len(self.owned) == len(other.owned)
            and all(a is b for a, b in zip(self.owned, other.owned, strict=True))
            and self.wrappers == other.wrappers
            and self.emptied == other.emptied
            and self.kinds == other.kinds
            and self.world is other.world
        )

    def changes(self, other: Snapshot) -> str:
        """What differs in `other`, in words."""
        mine, theirs = ({id(one[0]): one for one in snapshot.models} for snapshot in (self, other))
        came, went = len(theirs.keys() - mine.keys()), len(mine.keys() - theirs.keys())
        both = [(mine[key], theirs[key]) for key in mine.keys() & theirs.keys()]
        frozen = sum(a[4] != b[4] for a, b in both)
        changed = sum(a[4] == b[4] and not _alike(a, b) for a, b in both)
        told = [
            f"{number} {words}"
            for number, words in (
                (came, "parameters are new"),
                (went, "are gone"),
                (frozen, "were frozen or unfrozen"),
                (changed, "changed their dtype, device or shape"),
            )
            if number
        ]
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
        return parameter, None, None, None, trainable
    return parameter, parameter.dtype, parameter.device, parameter.shape, trainable


def _alike(one: _Parameter, other: _Parameter) -> bool:
    if one[0] is not other[0] or one[4] != other[4]:
        return False
    return one[1] is None or one[1:4] == other[1:4]  # a lazy parameter gets its shape later
