"""The forward of a held DDP: what it may leave out of DDP's own forward, and what it must keep.

Private in torch: `_pre_forward` and `_post_forward`, which DDP calls around its forward, and the attributes below.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.utils import _to_kwargs
from torch.nn.parallel import DistributedDataParallel

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn


def moved(ddp: DistributedDataParallel, *inputs: Any, **kwargs: Any) -> tuple[Any, Any]:
    """The inputs of a forward, on the device that DDP moves them to."""
    if not ddp.device_ids:
        return inputs, kwargs
    device = torch.device(ddp.device_type, ddp.device_ids[0])
    there, named = _to_kwargs(inputs, kwargs, device, ddp.use_side_stream_for_tensor_copies)
    return there[0], named[0]


def as_it_is(output: Any) -> Any:
    """What a forward returned, in place of DDP's `_post_forward`."""
    return output


def is_compiled(module: nn.Module) -> bool:
    """Whether torch.compile runs it, in a wrapper (`torch.compile(module)`) or in place (`module.compile()`)."""
    return hasattr(module, "_orig_mod") or module._compiled_call_impl is not None


def shortcut(ddp: DistributedDataParallel) -> Callable[..., Any] | None:
    """The forward of the module inside, if the forward of a held DDP would add nothing but its own cost; else None.

    That cost is more than half of a tiny model's forward. DDP's forward is needed where it moves or casts inputs, marks
    outputs for a search or a static graph, or tells torch.compile where it is.
    """
    works = ddp.device_ids or ddp.mixed_precision or ddp.find_unused_parameters or ddp.static_graph
    own = type(ddp).forward is not DistributedDataParallel.forward or "forward" in vars(ddp)
    compiled = any(map(is_compiled, ddp.modules()))
    in_backward = any(hasattr(parameter, "_in_backward_optimizers") for parameter in ddp._module_parameters)
    if works or own or compiled or in_backward or ddp._use_python_reducer:
        return None
    return ddp.module.__call__
