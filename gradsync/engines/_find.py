"""Which engines hold a model's gradients in step: found by walking its modules, once a window's set-up."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gradsync._errors import GradSyncError
from gradsync.engines._behind import BehindEngine
from gradsync.engines._ddp import DDPEngine

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from gradsync.engines._protocol import Engine

# What `register` was told. A finder looks at one module of the walk: an engine for it and all below it, or None.
_FINDERS: list[tuple[type[nn.Module], Callable[[Any], Engine]]] = [(DistributedDataParallel, DDPEngine)]

# The DDP behind a bare module. A memo: without it each epoch would pay for a DDP again. The values hold the
# parameters but not the module, so that an entry dies with its module.
_BEHIND: WeakKeyDictionary[nn.Module, BehindEngine] = WeakKeyDictionary()


def register(kind: type[nn.Module], make: Callable[[Any], Engine]) -> None:
    """Teach gradsync an engine: `make(module)` is called for each module of class `kind` in a model.

    What it returns is an `Engine`; the engines of this package are the examples.
    """
    _FINDERS.insert(0, (kind, make))


def find(models: Iterable[nn.Module]) -> list[Engine]:
    """The engines that are in `models` already; DDPs behind bare modules only if they are there."""
    engines, _ = _walk(models)
    roots = (_BEHIND.get(_bare(model)) for model in models)
    return [*engines, *(engine for engine in roots if engine is not None)]


def attach(models: Iterable[nn.Module], agree: Callable[[nn.Module], None] = lambda _: None) -> list[Engine]:
    """The engines of `models`; parameters that none of them covers get DDP behind their module. Collective.

    `agree(model)` is called before DDP is made, which hangs where the ranks' models differ.
    """
    models = list(models)
    engines, covered = _walk(models)
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return engines
    for model in map(_bare, models):
        parameters = {id(p): p for p in model.parameters() if id(p) not in covered}
        if model not in _BEHIND and any(p.requires_grad for p in parameters.values()):
            agree(model)
            _BEHIND[model] = BehindEngine(model, covered)
        if model in _BEHIND:
            engines.append(_BEHIND[model])
            covered |= parameters.keys()
    return engines


def behind(module: nn.Module) -> DistributedDataParallel | None:
    """The DDP that gradsync put behind a bare module, or None. Its own `module` is gone."""
    engine = _BEHIND.get(_bare(module))
    return None if engine is None else engine.ddp


def _walk(models: Iterable[nn.Module]) -> tuple[list[Engine], set[int]]:
    engines: list[Engine] = []
    covered: set[int] = set()
    seen: set[int] = set()
    for model in models:
        for module in model.modules():
            if id(module) in seen:
                continue
            seen.add(id(module))
            for kind, make in _FINDERS:
                if isinstance(module, kind):
                    engine = make(module)
                    engines.append(engine)
                    covered |= {id(parameter) for parameter in engine.parameters}
                    break
            else:
                _refuse_unknown(module)
    return engines, covered


def _refuse_unknown(module: nn.Module) -> None:
    # Every wrapper that synchronises gradients has one of these; Fabric's and Accelerate's only hold a DDP, found below.
    kind = type(module)
    if kind.__module__.startswith("lightning"):
        return
    if hasattr(kind, "no_sync") or kind.__module__.split(".")[0] in {"deepspeed", "horovod", "megatron"}:
        raise GradSyncError(
            f"gradsync has to hold back the synchronisation of every engine in the model, but it does not know "
            f"{kind.__module__}.{kind.__qualname__}. Teach it with "
            f"gradsync.engines.register({kind.__name__}, make_engine), or use DistributedDataParallel or fully_shard."
        )


def _bare(model: nn.Module) -> nn.Module:
    """The module under torch.compile's wrapper."""
    original = getattr(model, "_orig_mod", None)
    return original if isinstance(original, nn.Module) else model
