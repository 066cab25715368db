"""Takes out, and puts back, the gradients that the groups of `fully_shard` hold in the middle of a window.

A gradient has one of three forms there:

- whole, where a held backward leaves it;
- a piece, reduced to this rank's shard, in its group's partial output (`sync="shard"`);
- reduced over all ranks, at the parameter itself.

A gradient that is taken out has an additional first dimension for each mesh dimension that it was reduced over, which
tells its form. Such a dimension has size 1; in an empty piece, 0.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from gradsync._errors import GradSyncError
from gradsync.engines import _torch

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    import torch
    from torch import nn
    from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

    from gradsync.engines._fsdp2_use import Use


def take(groups: Iterable[FSDPParamGroup], used: Use) -> dict[nn.Parameter, torch.Tensor]:
    """The held gradients, by parameter; not copies.

    A piece is empty if this rank has not `used` the parameter and the piece is all zeros: at the boundary the ranks ask
    each other who has used it.
    """
    held: dict[nn.Parameter, torch.Tensor] = {}
    for group in groups:
        partly = _pieces(group)
        for param in group.fsdp_params:
            forms: list[torch.Tensor] = []
            whole = _torch.whole_gradient(param)
            if whole is not None:
                forms.append(whole)
            if param in partly:
                piece = partly[param].unsqueeze(0)
                forms.append(piece if param in used or piece.any() else piece[:0])
            reduced: Any = param.sharded_param.grad  # a DTensor
            if reduced is not None:
                forms.append(reduced.to_local()[(None,) * param.mesh_info.mesh.ndim])
            if len(forms) > 1:
                raise GradSyncError(
                    "A state in the middle of a window holds each gradient as one sync leaves it, but this window "
                    "was loaded from a state of another sync and has gone on since then, so that there are two. "
                    "Save at a boundary, where progress.index is 0."
                )
            if forms:
                held[param.sharded_param] = forms[0]
    return held


def put(groups: Iterable[FSDPParamGroup], gradients: Mapping[nn.Parameter, torch.Tensor]) -> None:
    """Hold these gradients and no others."""
    for group in groups:
        pieces: dict[FSDPParam, torch.Tensor] = {}
        group._partial_reduce_output = None
        for param in group.fsdp_params:
            gradient, form = gradients.get(param.sharded_param), _form(param, gradients)
            _torch.set_whole_gradient(param, None)
            param.sharded_param.grad = None
            if gradient is None:
                continue
            if form == "whole":
                _torch.set_whole_gradient(param, gradient.to(param.device))
            elif form == "piece":
                pieces[param] = gradient.to(param.device)
            else:  # where the shard is: under CPUOffloadPolicy that is not where the parameter computes
                shard = gradient.reshape(param._sharded_local_tensor.shape).to(param.sharded_param.device)
                param.sharded_param.grad = param.to_sharded_dtensor(shard)
        if pieces:
            _put_pieces(group, pieces)


def check_pieces(
    params: Iterable[FSDPParam], gradients: Mapping[nn.Parameter, torch.Tensor]
) -> dict[FSDPParam, torch.Tensor]:
    """The pieces among `gradients`; raise if one, or a reduced gradient, has another shape than this rank's shard."""
    pieces: dict[FSDPParam, torch.Tensor] = {}
    for param in params:
        form = _form(param, gradients)
        if form == "whole":
            continue
        gradient, mine = gradients[param.sharded_param], param._sharded_local_tensor.shape
        num_reduced = gradient.dim() - param.sharded_param.dim()
        if num_reduced > param.mesh_info.mesh.ndim or gradient.shape[num_reduced:] != mine:
            raise GradSyncError(
                'A state in the middle of a window, under sync="shard" or "each", can be loaded on the mesh that it '
                f"was saved on, but it has a piece of a gradient of shape {list(gradient.shape[num_reduced:])} where "
                f"this rank's shard is of shape {list(mine)}. Use the same mesh, and each rank's own state."
            )
        if form == "piece":
            pieces[param] = gradient
    return pieces


def _form(param: FSDPParam, gradients: Mapping[nn.Parameter, torch.Tensor]) -> Literal["whole", "piece", "reduced"]:
    gradient = gradients.get(param.sharded_param)
    if gradient is None or gradient.dim() == param.sharded_param.dim():
        return "whole"
    return "piece" if gradient.dim() - param.sharded_param.dim() < param.mesh_info.mesh.ndim else "reduced"


def _put_pieces(group: FSDPParamGroup, pieces: Mapping[FSDPParam, torch.Tensor]) -> None:
    layout = _torch.new_layout(group)
    size = sum(length for _, length in layout.values())
    group._partial_reduce_output = next(iter(pieces.values())).new_zeros(size)
    _torch.set_partial_layout(group, layout)
    for param, place in _pieces(group).items():
        if param in pieces:
            place.copy_(pieces[param].sum(0))  # its first dimension has size 0 or 1


def _pieces(group: FSDPParamGroup) -> dict[FSDPParam, torch.Tensor]:
    """The pieces in a group's partial output, by parameter: views, in the shape of this rank's shard."""
    output = group._partial_reduce_output
    if output is None:
        return {}
    shapes = {param: param._sharded_local_tensor.shape for param in group.fsdp_params}
    return {
        param: output[start : start + shapes[param].numel()].view(shapes[param])
        for param, (start, _) in _torch.partial_layout(group).items()
    }
