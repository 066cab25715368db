"""What a flat parameter of FSDP1 holds: its parameters, its gradient whole or in pieces, what a forward has left.

A held gradient has the size of the whole flat parameter; a reduced one has the size of this rank's shard.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import nn
    from torch.distributed.fsdp._flat_param import FlatParameter, FlatParamHandle


def own(handle: FlatParamHandle) -> list[nn.Parameter]:
    """The parameters of which the user's optimizer knows: the original ones, or the flat one."""
    return handle.flat_param._params or [handle.flat_param]


def has_run(handle: FlatParamHandle) -> bool:
    """Whether FSDP has made room to gather a sharded flat parameter, as it does in a first forward."""
    return hasattr(handle.flat_param, "_full_param_padded")


def is_gathered(handle: FlatParamHandle) -> bool:
    """Whether the whole of a sharded flat parameter is there."""
    return handle.uses_sharded_strategy and has_run(handle) and not handle.needs_unshard()


def set_gradient(parameter: nn.Parameter, gradient: torch.Tensor | None) -> None:
    """Set a gradient, perhaps of another size and type than the parameter's shard, as a held backward does."""
    if gradient is None:
        parameter.grad = None
    elif parameter.grad is not gradient:
        data = gradient.data
        gradient.data = torch.empty_like(parameter)  # which fits
        parameter.grad = gradient
        gradient.data = data


def set_aside(handle: FlatParamHandle) -> Callable[[], None]:
    """Before its parameters are frozen for a while: take away what is held; returns what puts it back.

    A forward of frozen parameters would drop the gradients of original ones, and a second one write zeros to the flat
    one; its backward moves that elsewhere. A hook that an earlier forward has left would be taken for its own.
    """
    flat = handle.flat_param
    hook = vars(flat).pop("_post_backward_hook_state", None)
    mask = [*(flat._is_grad_none_mask or ())]
    gradients = [(one, one.grad) for one in (flat, *own(handle))]
    is_held = flat.grad is not None
    for one, _ in gradients if is_held else ():
        one.grad = None

    def put_back() -> None:
        if hook is not None:
            flat._post_backward_hook_state = hook
        if is_held:
            vars(flat).pop("_saved_grad_shard", None)
            flat._is_grad_none_mask = mask or None
            for parameter, gradient in gradients:
                set_gradient(parameter, gradient)

    return put_back


def is_whole(flat: FlatParameter, gradient: torch.Tensor) -> bool:
    """Whether a gradient has the size of the whole flat parameter: it is held, or not sharded. Else it is reduced."""
    return gradient.shape == flat._unpadded_unsharded_size


def forget_hook(flat: FlatParameter) -> None:
    """Remove what a forward has registered for its backward."""
    hooks: Any = vars(flat).pop("_post_backward_hook_state", None)
    if hooks is not None:
        hooks[-1].remove()


def holds_whole(flat: FlatParameter) -> bool:
    return flat.grad is not None and is_whole(flat, flat.grad)


def parts(handle: FlatParamHandle, gradient: torch.Tensor) -> dict[nn.Parameter, torch.Tensor]:
    """Views of a flat gradient by parameter: whole gradients, or pieces, which have one dimension more."""
    flat = handle.flat_param
    whole = is_whole(flat, gradient)
    if flat._params is None:
        return {flat: gradient if whole else gradient.unsqueeze(0)}
    if whole:
        return dict(zip(flat._params, handle._get_unflat_views(gradient), strict=True))
    return {
        parameter: gradient[info.offset_in_shard :][: info.numel_in_shard].view(*[1] * len(shape), -1)
        for parameter, shape, info in zip(flat._params, flat._shapes, flat._shard_param_infos, strict=True)
        if info.in_shard
    }


def views(handle: FlatParamHandle) -> Iterator[tuple[torch.Tensor, nn.Parameter]]:
    """The views of a flat parameter that stand in modules in place of its parameters, with these.

    A forward whose backward has not run leaves them (SHARD_GRAD_OP), and so does a backward that has not come to the
    flat parameter (NO_SHARD): then the parameters are not even in `_parameters`. All of them are there, or none.
    """
    flat = handle.flat_param
    for info, parameter in zip(flat._param_infos, flat._params or (), strict=False):
        view = vars(info.module).get(info.param_name)
        if not isinstance(view, torch.Tensor) or view is parameter:
            return
        yield view, parameter
