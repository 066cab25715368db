"""Finds the engines in a model, by walking its modules, and puts DDP behind what has none."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gradsync import _state
from gradsync._errors import GradSyncError
from gradsync.engines._behind import BehindEngine, Rest
from gradsync.ranks.group import is_alive, ranks_of, several_ranks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from gradsync.engines._protocol import Engine

# The file and the function that make the engine for a module, by the name of its class: importing
# torch.distributed.fsdp would take seconds.
_MAKERS = {
    "torch.nn.parallel.distributed.DistributedDataParallel": ("_kinds", "ddp_engine"),
    "torch.distributed._composable.replicate.DDP": ("_replicate", "replicate_engine"),
    "torch.distributed.fsdp.FSDPModule": ("_fsdp2", "FSDP2Engine"),
    "torch.distributed.fsdp.fully_sharded_data_parallel.FullyShardedDataParallel": ("_fsdp1", "FSDP1Engine"),
}

_KEPT = 3  # engines behind a module: so many sets of participants may take turns without new engines


def register(kind: type[nn.Module], make: Callable[[Any], Engine]) -> None:
    """Teach gradsync an engine: `make(module)` is called for each module of class `kind` in a model.

    It returns an `Engine`; the engines of this package are examples.
    """
    _state.MAKERS[kind] = make


def find(models: Iterable[nn.Module]) -> list[Engine]:
    """The engines in `models`, and those behind bare modules. Makes none."""
    models = list(models)
    engines, _ = _walk(models)
    for model in map(bare, models):
        engines += [one for one in _behind(model) if one not in engines][-1:]
    return engines


def attach(
    models: Iterable[nn.Module],
    loose: Iterable[nn.Parameter] = (),
    agree: Callable[[dist.ProcessGroup | None, Sequence[tuple[str, nn.Parameter]]], None] = lambda *_: None,
) -> list[Engine]:
    """The engines of `models`. Parameters in no engine, `loose` ones too, get DDP behind them. Collective.

    `agree(group, named_parameters)` is called before such a DDP is made, which would hang if the ranks' models differ.
    """
    models = list(models)
    engines, covered = _walk(models)
    group = common_group(engines)
    if not several_ranks():
        return engines
    for rest in _rests([bare(model) for model in models], loose, covered):
        anchor = rest.roots[0] if rest.roots else models[0]
        _end_outgrown({anchor, *rest.roots})
        known = next((one for one in _behind(anchor) if one.is_for(rest.parameters, group)), None)
        if known is None:
            agree(group, list(_named(rest)))
            known = BehindEngine(rest, group)
            for root in {anchor, *rest.roots}:
                _state.BEHIND[root] = [*_behind(root), known][-_KEPT:]
        else:
            for root in {anchor, *rest.roots}:  # the latest comes last
                _state.BEHIND[root] = [*(one for one in _behind(root) if one is not known), known]
        engines.append(known)
    return engines


def uncovered(models: Iterable[nn.Module], engines: Iterable[Engine]) -> list[str]:
    """The names of trainable parameters in `models` that are in none of `engines`."""
    covered = {id(parameter) for engine in engines for parameter in engine.parameters}
    return [
        name
        for model in models
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and id(parameter) not in covered and _mesh(parameter) is None
    ]


def ungather(models: Iterable[nn.Module]) -> None:
    """Make `model.parameters()` those of the optimizers, if a forward has left other tensors in their place."""
    models = list(models)
    kinds = {type(module) for model in models for module in model.modules()} - {DistributedDataParallel}
    if any(map(is_engine, kinds)):  # DDP leaves none
        for engine in find(models):
            engine.ungather()


def behind(module: nn.Module) -> DistributedDataParallel | None:
    """The DDP that gradsync put behind a bare module, or None. Its own `module` is gone."""
    engines = _behind(bare(module))
    return engines[-1].ddp if engines else None


def is_in_pieces(parameter: nn.Parameter) -> bool:
    """Whether `FullyShardedDataParallel` keeps it, or a view of it, in a flat parameter that may be sharded.

    Private in torch (2.13, `_common_utils.FSDP_FLATTENED`): the mark that it sets on them.
    """
    return bool(getattr(parameter, "_fsdp_flattened", False))


def is_engine(kind: type) -> bool:
    """Whether an engine is made for modules of this class."""
    return issubclass(kind, nn.Module) and _make_for(kind) is not None


def common_group(engines: Sequence[Engine]) -> dist.ProcessGroup | None:
    """The group over which these engines synchronise; raises if they have different groups."""
    ranks = {tuple(sorted(ranks_of(engine.group))) for engine in engines}
    if len(ranks) > 1:
        raise GradSyncError(
            "All engines of one step must synchronise over the same ranks, but they do so over "
            f"{' and over '.join(str(list(one)) for one in sorted(ranks))}. Give models on other groups a step "
            "function of their own."
        )
    return engines[0].group if engines else None


def bare(model: nn.Module) -> nn.Module:
    """The module under torch.compile's wrapper."""
    original = getattr(model, "_orig_mod", None)
    return original if isinstance(original, nn.Module) else model


def _behind(module: nn.Module) -> list[BehindEngine]:
    """The engines behind a bare module whose group still exists, the latest last."""
    engines = _state.BEHIND.get(module, [])
    return [one for one in engines if is_alive(one.group)]


def _end_outgrown(roots: Iterable[nn.Module]) -> None:
    """Let go of the engines whose reducers no gradient reaches any more, so that the next finds things as they are."""
    known = {root: _state.BEHIND[root] for root in roots if root in _state.BEHIND}
    outgrown = {one for engines in known.values() for one in engines if one.is_outgrown}
    for one in outgrown:
        one.forget_reducer()
    for root, engines in known.items():
        _state.BEHIND[root] = [one for one in engines if one not in outgrown]


def _walk(models: Iterable[nn.Module]) -> tuple[list[Engine], set[int]]:
    engines: list[Engine] = []
    covered: set[int] = set()
    seen: set[int] = set()
    compiled: set[int] = set()
    for model in models:
        for module in model.modules():
            if id(module) in seen:
                continue
            seen.add(id(module))
            if bare(module) is not module:
                compiled.update(map(id, module.modules()))
            make = _make_for(type(module))
            if make is None:
                _refuse_unknown(module)
                continue
            engine = make(module)
            engine.is_compiled = id(module) in compiled
            engines.append(engine)
            covered.update(map(id, engine.parameters))
            seen.update(map(id, engine.modules))
    return engines, covered


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
        others = covered | {id(p) for p in inside if p.device.type != device}
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
    mesh = _mesh(parameter)
    if mesh is not None and mesh.size() < dist.get_world_size():
        raise GradSyncError(
            "Parameters that are DTensors of a part of the ranks need an engine that keeps the parts in step, but "
            f"{mesh} has none. Call fully_shard or replicate on the model, with the mesh's data-parallel dimension."
        )
    return mesh is None  # on a mesh of all ranks, DTensor itself keeps them in step


def _mesh(parameter: nn.Parameter) -> Any:
    return getattr(parameter, "device_mesh", None)


def _make_for(kind: type[nn.Module]) -> Callable[[Any], Engine] | None:
    for base in kind.__mro__:
        if base is nn.Module:
            break
        if base in _state.MAKERS:
            return _state.MAKERS[base]
        where = _MAKERS.get(f"{base.__module__}.{base.__qualname__}")
        if where is not None:
            make: Callable[[Any], Engine] = getattr(import_module(f"gradsync.engines.{where[0]}"), where[1])
            return make
    return None


def _refuse_unknown(module: nn.Module) -> None:
    # A wrapper that synchronises gradients has one of these; Fabric's and Accelerate's only hold a DDP, found below.
    kind = type(module)
    if kind.__module__.startswith("lightning"):
        return
    switches = hasattr(kind, "no_sync") or hasattr(kind, "set_requires_gradient_sync")
    if switches or kind.__module__.split(".")[0] in {"deepspeed", "horovod", "megatron"}:
        raise GradSyncError(
            f"gradsync has to hold back the synchronisation of every engine in the model, but it does not know "
            f"{kind.__module__}.{kind.__qualname__}. Teach it with "
            f"gradsync.engines.register({kind.__name__}, make_engine), or use DistributedDataParallel or fully_shard."
        )
