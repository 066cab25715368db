"""Finds the engines in a model, by walking its modules, and those behind bare modules."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gradsync import _state
from gradsync._errors import GradSyncError
from gradsync.ranks.group import is_alive, ranks_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    import torch

    from gradsync.engines._ddp_behind import BehindEngine
    from gradsync.engines._protocol import Engine

# The file and the function that make the engine for a module, by the name of its class: importing
# torch.distributed.fsdp would take seconds.
_MAKERS = {
    "torch.nn.parallel.distributed.DistributedDataParallel": ("_ddp_choice", "ddp_engine"),
    "torch.distributed._composable.replicate.DDP": ("_replicate", "replicate_engine"),
    "torch.distributed.fsdp.FSDPModule": ("_fsdp2", "FSDP2Engine"),
    "torch.distributed.fsdp.fully_sharded_data_parallel.FullyShardedDataParallel": ("_fsdp1", "FSDP1Engine"),
}


def register(kind: type[nn.Module], make: Callable[[Any], Engine]) -> None:
    """Teach gradsync an engine: `make(module)` is called for each module of class `kind` in a model.

    It returns an `Engine`; the engines of this package are examples.
    """
    _state.MAKERS[kind] = make


def find(models: Iterable[nn.Module]) -> list[Engine]:
    """The engines in `models`, and those behind bare modules. Makes none."""
    models = list(models)
    engines, _ = walk(models)
    for model in map(bare, models):
        engines += [one for one in engines_behind(model) if one not in engines][-1:]
    return engines


def uncovered(models: Iterable[nn.Module], engines: Iterable[Engine]) -> list[str]:
    """The names of trainable parameters in `models` that are in none of `engines`."""
    covered = {id(one) for engine in engines for one in (*engine.parameters, *engine.gathered)}
    return [
        name
        for model in models
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and id(parameter) not in covered and mesh_of(parameter) is None
    ]


def ungather(models: Iterable[nn.Module]) -> list[torch.Tensor]:
    """Make `model.parameters()` those of the optimizers; returns what a forward had left in their place."""
    models = list(models)
    kinds = {type(module) for model in models for module in model.modules()} - {DistributedDataParallel}
    engines = find(models) if any(map(is_engine, kinds)) else ()  # DDP leaves nothing
    gathered = [tensor for engine in engines for tensor in engine.gathered]
    for engine in engines:
        engine.ungather()
    return gathered


def behind(module: nn.Module) -> DistributedDataParallel | None:
    """The DDP that gradsync put behind a bare module, or None. Its own `module` is gone."""
    engines = engines_behind(bare(module))
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


def engines_behind(module: nn.Module) -> list[BehindEngine]:
    """The engines behind a bare module whose group still exists, the latest last."""
    engines = _state.BEHIND.get(module, [])
    return [one for one in engines if is_alive(one.group)]


def walk(models: Iterable[nn.Module]) -> tuple[list[Engine], set[int]]:
    """The engines in `models`, and the ids of the parameters that they have."""
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


def mesh_of(parameter: nn.Parameter) -> Any:
    """The mesh of a `DTensor`; None for a plain parameter."""
    return getattr(parameter, "device_mesh", None)


def twins_of(parameters: Iterable[nn.Parameter]) -> list[dist.ProcessGroup]:
    """The ranks that run a forward of these parameters together, because they are `DTensor`s, and in no engine."""
    meshes = dict.fromkeys(mesh for parameter in parameters if (mesh := mesh_of(parameter)) is not None)
    groups = dict.fromkeys(mesh.get_group(dimension) for mesh in meshes for dimension in range(mesh.ndim))
    return [group for group in groups if group.size() > 1]


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
