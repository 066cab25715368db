"""What takes part, looked at as it is now: parameters and wrappers by what they are, not by which objects were seen."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import nn

from gradsync.engines import is_engine
from gradsync.ranks.group import several_ranks

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

_Parameter = tuple[Any, ...]


@dataclass(frozen=True, eq=False)
class Scene:
    """The models and optimizers of a step at one moment, to be compared with another.

    It holds parameters, and no modules: whoever keeps a scene must not keep a model alive.
    """

    models: Sequence[_Parameter]
    num_inside: int  # of these, the first so many are in a model
    owned: Sequence[nn.Parameter]
    wrappers: Sequence[int]  # the ids of modules that engines are made for: as many, at the same places
    kinds: Mapping[type, bool]  # the classes of all modules, and whether an engine is made for these
    world: object  # the default process group, if there is one of several ranks

    @classmethod
    def of(
        cls,
        models: Iterable[nn.Module],
        owned: Iterable[nn.Parameter],
        before: Scene | None = None,
        trained: frozenset[int] | None = None,
    ) -> Scene:
        """How things are now; what `before` knew of classes is not worked out again.

        Whether a parameter is frozen matters for those that are `trained`, given by their ids, and not for bystanders.
        """
        found: dict[nn.Parameter, None] = {}
        wrappers: list[int] = []
        kinds: dict[type, bool] = {} if before is None else dict(before.kinds)
        seen: dict[type, None] = {}
        for model in models:
            for place, module in enumerate(model.modules()):
                kind = type(module)
                seen[kind] = None
                wraps = kinds.get(kind)
                if wraps is None:
                    wraps = kinds[kind] = is_engine(kind)
                if wraps:
                    wrappers += [place, id(module)]
                for parameter in module._parameters.values():
                    if parameter is not None:
                        found[parameter] = None
        mine = tuple(owned)
        alike = tuple(_likeness(p, trained) for p in dict.fromkeys((*found, *mine)))
        world = dist.group.WORLD if several_ranks() else None
        return cls(alike, len(found), mine, wrappers, {kind: kinds[kind] for kind in seen}, world)

    def is_like(self, other: Scene) -> bool:
        """Whether nothing has changed that matters to an engine."""
        return (
            len(self.models) == len(other.models)
            and self.num_inside == other.num_inside
            and all(map(_alike, self.models, other.models))
            and len(self.owned) == len(other.owned)
            and all(a is b for a, b in zip(self.owned, other.owned, strict=True))
            and self.wrappers == other.wrappers
            and self.kinds == other.kinds
            and self.world is other.world
        )

    def changes(self, other: Scene) -> str:
        """What is different in `other`, in words."""
        mine, theirs = ({id(one[0]): one for one in scene.models} for scene in (self, other))
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
        return ", ".join(told) or "the optimizers' parameters or the wrappers are others"


def _likeness(parameter: nn.Parameter, trained: frozenset[int] | None) -> _Parameter:
    trainable = parameter.requires_grad and (trained is None or id(parameter) in trained)
    if isinstance(parameter, nn.parameter.UninitializedParameter):
        return parameter, None, None, None, trainable
    return parameter, parameter.dtype, parameter.device, parameter.shape, trainable


def _alike(one: _Parameter, other: _Parameter) -> bool:
    if one[0] is not other[0] or one[4] != other[4]:
        return False
    return one[1] is None or one[1:4] == other[1:4]  # a lazy one takes any shape, once
