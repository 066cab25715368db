"""Puts DDP behind parameters that are in no engine: one for each set of participants, kept as long as it fits."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn

from gradsync import _state
from gradsync._errors import GradSyncError
from gradsync.engines._ddp_behind import BehindEngine, Rest
from gradsync.engines._find import bare, common_group, engines_behind, mesh_of, walk
from gradsync.engines._shared_buffers import shared_buffers
from gradsync.ranks.group import several_ranks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from gradsync.engines._protocol import Engine

    _Named = Sequence[tuple[str, torch.Tensor]]

_KEPT = 3  # engines behind a module: so many sets of participants may take turns without new engines


def attach(
    models: Iterable[nn.Module],
    loose: Iterable[nn.Parameter] = (),
    agree: Callable[[dist.ProcessGroup | None, _Named, _Named], None] = lambda *_: None,
) -> list[Engine]:
    """The engines of `models`. Parameters in no engine, `loose` ones too, get DDP behind them. Collective.

    `agree(group, named_parameters, named_buffers)` is called before such a DDP is made, which would hang if the ranks'
    parameters differed, and scramble buffers that do.
    """
    models = list(models)
    engines, covered = walk(models)
    group = common_group(engines)
    if not several_ranks():
        return engines
    for rest in _rests([bare(model) for model in models], loose, covered):
        anchor = rest.roots[0] if rest.roots else models[0]
        _end_outgrown({anchor, *rest.roots})
        known = next((one for one in engines_behind(anchor) if one.is_for(rest.parameters, group)), None)
        if known is None:
            agree(group, [*_named(rest)], [one for root in rest.roots for one in shared_buffers(root)])
            known = BehindEngine(rest, group)
            for root in {anchor, *rest.roots}:
                _state.BEHIND[root] = [*engines_behind(root), known][-_KEPT:]
        else:
            for root in {anchor, *rest.roots}:  # the latest comes last
                _state.BEHIND[root] = [*(one for one in engines_behind(root) if one is not known), known]
        engines.append(known)
    return engines


def _end_outgrown(roots: Iterable[nn.Module]) -> None:
    """Let go of the engines whose reducers no gradient reaches any more, so that the next finds things as they are."""
    known = {root: _state.BEHIND[root] for root in roots if root in _state.BEHIND}
    outgrown = {one for engines in known.values() for one in engines if one.is_outgrown}
    for one in outgrown:
        one.forget_reducer()
    for root, engines in known.items():
        _state.BEHIND[root] = [one for one in engines if one not in outgrown]


def _rests(roots: Sequence[nn.Module], loose: Iterable[nn.Parameter], covered: set[int]) -> Iterator[Rest]:
    """What is in no engine and needs one, by type of device, because a DDP takes a single type."""
    inside: dict[nn.Parameter, None] = {}
    owned = {id(parameter): parameter for parameter in loose}
    for root in roots:
        ignored = set(getattr(root, "_ddp_params_and_buffers_to_ignore", ()))
        for name, parameter in root.named_parameters():
            if id(parameter) not in covered and (name not in ignored or id(parameter) in owned):
                inside[parameter] = None
    outside = [parameter for key, parameter in owned.items() if parameter not in inside and key not in covered]
    trainable = [parameter for parameter in (*outside, *inside) if _needs_engine(parameter)]
    for device in dict.fromkeys(parameter.device.type for parameter in trainable):
        mine = [parameter for parameter in trainable if parameter.device.type == device]
        others = covered | {id(p) for p in inside if p.device.type != device or mesh_of(p) is not None}
        ids = set(map(id, mine))
        own = [root for root in roots if any(id(parameter) in ids for parameter in root.parameters())]
        yield Rest(own, [p for p in outside if id(p) in ids], others, mine)


def _named(rest: Rest) -> Iterator[tuple[str, nn.Parameter]]:
    ids = set(map(id, rest.parameters))
    for place, parameter in enumerate(rest.loose):
        yield f"parameter {place} of no model", parameter
    for root in rest.roots:
        yield from ((name, parameter) for name, parameter in root.named_parameters() if id(parameter) in ids)


def _needs_engine(parameter: nn.Parameter) -> bool:
    if not parameter.requires_grad:
        return False
    if isinstance(parameter, nn.parameter.UninitializedParameter):
        raise GradSyncError(
            "A model on several ranks needs all of its parameters before its first window, but one of a lazy module "
            "has no shape yet. Run one forward before the first call: with torch.no_grad(): model(batch)."
        )
    if parameter.is_meta:
        raise GradSyncError(
            "A model on several ranks needs its parameters on a device before its first window, but one of shape "
            f"{list(parameter.shape)} is on the meta device, without values. Call model.to_empty(device=...) and load "
            "or initialise it, or switch its requires_grad off."
        )
    mesh = mesh_of(parameter)
    if mesh is not None and mesh.size() < dist.get_world_size():
        raise GradSyncError(
            "Parameters that are DTensors of a part of the ranks need an engine that keeps the parts in step, but "
            f"{mesh} has none. Call fully_shard or replicate on the model, with the mesh's data-parallel dimension."
        )
    return mesh is None  # on a mesh of all ranks, DTensor itself keeps them in step
