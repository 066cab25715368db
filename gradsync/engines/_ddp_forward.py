"""The forward of a DDP that is held: what of DDP's own is left out of it, and what must stay.

Private in torch: `_pre_forward` and `_post_forward`, which stand around DDP's forward, and the attributes below.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.utils import _to_kwargs
from torch.nn.parallel import DistributedDataParallel

if TYPE_CHECKING:
    from collections.abc import Callable


def moved(ddp: DistributedDataParallel, *inputs: Any, **kwargs: Any) -> tuple[Any, Any]:
    """The inputs of a forward, on the device that DDP moves them to."""
    if not ddp.device_ids:
        return inputs, kwargs
    device = torch.device(ddp.device_type, ddp.device_ids[0])
    there, named = _to_kwargs(inputs, kwargs, device, ddp.use_side_stream_for_tensor_copies)
    return there[0], named[0]


def as_it_is(output: Any) -> Any:
    """What a forward returned."""
    return output


def shortcut(ddp: DistributedDataParallel) -> Callable[..., Any] | None:
    """The forward of the module inside, where that of a DDP that is held would add nothing to it but its own cost.

    Which is more than half of a tiny model's. It may move or cast inputs, mark the outputs of a search or a static
    graph, and tell torch.compile where it is; these keep it.
    """
    works = ddp.device_ids or ddp.mixed_precision or ddp.find_unused_parameters or ddp.static_graph
    own = type(ddp).forward is not DistributedDataParallel.forward or "forward" in vars(ddp)
    compiled = any(hasattr(one, "_orig_mod") or one._compiled_call_impl is not None for one in ddp.modules())
    in_backward = any(hasattr(parameter, "_in_backward_optimizers") for parameter in ddp._module_parameters)
    if works or own or compiled or in_backward or ddp._use_python_reducer:
        return None
    return ddp.module.__call__
