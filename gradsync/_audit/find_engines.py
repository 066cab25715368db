"""Finds the engines in a model by walking its modules, through compiled and other wrappers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gradsync._audit.engines import WatchedDDP
from gradsync._errors import GradSyncError
from gradsync.engines import behind


def find_ddps(models: Iterable[nn.Module], known: Iterable[WatchedDDP]) -> list[WatchedDDP]:
    """Return the DDPs in `models` that are not among `known`."""
    seen = {id(one.ddp) for one in known}
    wrapped: set[int] = set()  # modules inside a DDP, which one that was behind them earlier no longer concerns
    found = []
    for model in models:
        for module in model.modules():
            owner = None
            if isinstance(module, DistributedDataParallel):
                ddp: DistributedDataParallel | None = module
                wrapped |= set(map(id, module.module.modules()))
            elif id(module) not in wrapped and (ddp := behind(module)) is not None:
                owner = module
            else:
                ddp = _inside_replicate(module)
            if ddp is None or id(ddp) in seen:
                continue
            seen.add(id(ddp))
            if ddp._use_python_reducer:
                raise GradSyncError(
                    "audit needs DistributedDataParallel's own reducer, but this one was made under torch._dynamo's "
                    'optimize_ddp="python_reducer", whose reductions are part of the compiled graph. Audit the loop '
                    "without that setting."
                )
            if ddp._delay_all_reduce_params:
                raise GradSyncError(
                    "audit needs all gradients to go through DistributedDataParallel's reducer, but this one was made "
                    "with delay_all_reduce_named_params, which reduces those in every backward beside it. Leave that "
                    "argument out to audit the loop."
                )
            found.append(WatchedDDP(ddp, owner))
    return found


def find_fsdp2(model: nn.Module) -> list[Any]:
    """Return the states of the fully sharded modules in `model`, each once."""
    if not dist.is_available():
        return []
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel  # there only with distributed

    states: dict[int, Any] = {}
    for module in model.modules():
        if isinstance(module, FSDPModule):
            state = module._get_fsdp_state()
            states[id(state)] = state
        elif isinstance(module, FullyShardedDataParallel):
            raise GradSyncError(
                "audit knows DistributedDataParallel and fully_shard, but the model is a FullyShardedDataParallel "
                "(FSDP1), whose reductions it cannot see. Move the model to fully_shard to audit it."
            )
    return list(states.values())


def _inside_replicate(module: nn.Module) -> DistributedDataParallel | None:
    # torch.distributed._composable.replicate makes its DDP in the first forward, and keeps it in the module's state.
    # Private in torch 2.13.
    from torch.distributed._composable.contract import STATE_KEY

    for state in module.__dict__.get(STATE_KEY, {}).values():
        ddp = getattr(state, "_ddp", None)
        if isinstance(ddp, DistributedDataParallel):
            return ddp
    return None
