"""`ddp`: a model on `DistributedDataParallel`, where there is something to synchronise."""

from __future__ import annotations

from typing import Any, Literal

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gradsync.launch.compress_of_ddp import compress_gradients
from gradsync.overlap import check_compress
from gradsync.ranks.group import require_group


def ddp(model: nn.Module, *, compress: Literal["bf16"] | None = None, **kwargs: Any) -> nn.Module:
    """The model on `DistributedDataParallel` if there are several ranks and something to train, else the model itself.

    With `compress="bf16"` gradients travel, and are added up, in bfloat16. The other keywords are those of
    `DistributedDataParallel`. A model that is on it already comes back itself, with `compress` if that is asked for.

    >>> model = torch.nn.Linear(1, 1)
    >>> gradsync.ddp(model) is model  # one process
    True
    """
    check_compress(compress)
    require_group("gradsync.ddp")
    home = getattr(model, "_orig_mod", model)  # the module that torch.compile has wrapped
    if not isinstance(home, DistributedDataParallel):
        several = dist.is_available() and dist.is_initialized() and dist.get_world_size(_group(kwargs)) > 1
        if not several or not any(parameter.requires_grad for parameter in model.parameters()):
            return model
        model = home = DistributedDataParallel(model, **_on_its_device(model, kwargs))
    if compress is not None:
        compress_gradients(home)
    return model


def _group(kwargs: dict[str, Any]) -> dist.ProcessGroup | None:
    mesh = kwargs.get("device_mesh")
    group: dist.ProcessGroup | None = kwargs.get("process_group")
    return group if mesh is None else mesh.get_group()


def _on_its_device(model: nn.Module, kwargs: dict[str, Any]) -> dict[str, Any]:
    """The keywords, with the accelerator's number as `device_ids` if all of the model is on one."""
    devices = {parameter.device for parameter in model.parameters()}
    device = next(iter(devices))
    if len(devices) > 1 or device.type == "cpu" or device.index is None:
        return kwargs
    return {"device_ids": [device.index], **kwargs}
