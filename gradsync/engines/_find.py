"""Which engines hold a model's gradients in step: found by walking its modules, once a window's set-up."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch import nn

from gradsync._errors import GradSyncError
from gradsync.engines._behind import BehindEngine

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable

    from torch.nn.parallel import DistributedDataParallel

    from gradsync.engines._protocol import Engine


def _maker(where: str, name: str) -> Callable[[Any], Engine]:
    """An engine of this package, imported as the first is made: torch.distributed.fsdp alone takes seconds."""

    def make(module: nn.Module) -> Engine:
        engine: Engine = getattr(import_module(f"gradsync.engines.{where}"), name)(module)
        return engine

    return make


# What makes the engine for a module of some class: by the class's name for those whose import is put off, and by the
# class for what `register` was told.
_MAKERS: dict[str | type, Callable[[Any], Engine]] = {
    "torch.nn.parallel.distributed.DistributedDataParallel": _maker("_ddp", "DDPEngine"),
    "torch.distributed._composable.replicate.DDP": _maker("_replicate", "ReplicateEngine"),
    "torch.distributed.fsdp.FSDPModule": _maker("_fsdp2", "FSDP2Engine"),
    "torch.distributed.fsdp.fully_sharded_data_parallel.FullyShardedDataParallel": _maker("_fsdp1", "FSDP1Engine"),
}

# The DDP behind a bare module. A memo: without it each epoch would pay for a DDP again. The values hold the
# parameters but not the module, so that an entry dies with its module.
_BEHIND: WeakKeyDictionary[nn.Module, BehindEngine] = WeakKeyDictionary()


def register(kind: type[nn.Module], make: Callable[[Any], Engine]) -> None:
    """Teach gradsync an engine: `make(module)` is called for each module of class `kind` in a model.

    What it returns is an `Engine`; the engines of this package are the examples.
    """
    _MAKERS[kind] = make


def find(models: Iterable[nn.Module]) -> list[Engine]:
    """The engines that are in `models` already; DDPs behind bare modules only if they are there."""
    engines, _ = _walk(models)
    roots = (_BEHIND.get(_bare(model)) for model in models)
    return [*engines, *(engine for engine in roots if engine is not None)]


def attach(
    models: Iterable[nn.Module], agree: Callable[[nn.Module, Collection[int]], None] = lambda *_: None
) -> list[Engine]:
    """The engines of `models`; parameters that none of them covers get DDP behind their module. Collective.

    `agree(model, covered)` is called before DDP is made for the rest, which hangs where the ranks' models differ.
    """
    models = list(models)
    engines, covered = _walk(models)
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return engines
    group = engines[0].group if engines else None
    for model in map(_bare, models):
        parameters = {id(p): p for p in model.parameters() if id(p) not in covered}
        if model not in _BEHIND and _needs_engine(parameters.values()):
            agree(model, covered)
            _BEHIND[model] = BehindEngine(model, covered, group)
        if model in _BEHIND:
            engines.append(_BEHIND[model])
            covered |= parameters.keys()
    return engines


def rest(models: Iterable[nn.Module]) -> None:
    """Make `model.parameters()` those of the optimizers, also where a forward has left others in their place."""
    for engine in find(models):
        engine.rest()


def behind(module: nn.Module) -> DistributedDataParallel | None:
    """The DDP that gradsync put behind a bare module, or None. Its own `module` is gone."""
    engine = _BEHIND.get(_bare(module))
    return None if engine is None else engine.ddp


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
            if _bare(module) is not module:
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


def _needs_engine(bare: Iterable[nn.Parameter]) -> bool:
    trainable = [parameter for parameter in bare if parameter.requires_grad]
    meshes: set[Any] = {getattr(parameter, "device_mesh", None) for parameter in trainable} - {None}
    if any(mesh.size() < dist.get_world_size() for mesh in meshes):
        raise GradSyncError(
            "Parameters that are DTensors of a part of the ranks need an engine that keeps the parts in step, but "
            f"{'; '.join(map(str, meshes))} has none. Call fully_shard or replicate on the model, with the mesh's "
            "data-parallel dimension."
        )
    return bool(trainable) and not meshes  # on a mesh of all ranks, DTensor itself keeps them in step


def _make_for(kind: type[nn.Module]) -> Callable[[Any], Engine] | None:
    for base in kind.__mro__:
        if base is nn.Module:
            break
        make = _MAKERS.get(base) or _MAKERS.get(f"{base.__module__}.{base.__qualname__}")
        if make is not None:
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


def _bare(model: nn.Module) -> nn.Module:
    """The module under torch.compile's wrapper."""
    original = getattr(model, "_orig_mod", None)
    return original if isinstance(original, nn.Module) else model
