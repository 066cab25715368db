"""Checks whether gradsync can use a `DistributedDataParallel`, and whether its reducer fits the present parameters.

Private in torch: `_delay_all_reduce_params`, `_module_parameters`, `_get_ddp_logging_data`, and of the reducer
`_get_zeros_like_grad_buckets`; of autograd's nodes `_input_metadata`, which has the shape that a node was made for; of
the local parts of a tensor-parallel model's parameters `_st_info`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge

from gradsync._errors import GradSyncError
from gradsync._state import WIRES
from gradsync.engines._torch import ddp_finalizes_by_hand
from gradsync.ranks.group import is_alive

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from torch.nn.parallel import DistributedDataParallel


class Joint(torch.autograd.Function):
    """Joins parameters in the graph: its backward runs their gradient hooks, and adds nothing to any gradient.

    The reducer's hooks run and reduce the gradients that are there already: a synchronisation without a forward. It is
    exact, because an undefined gradient adds nothing. If DDP looks for unused parameters, the gradient of a parameter
    that nobody used stays None.
    """

    @staticmethod
    def forward(ctx: Any, *parameters: torch.Tensor) -> torch.Tensor:
        ctx.num_parameters = len(parameters)
        return torch.zeros((), device=parameters[0].device)  # real, even if a parameter is complex

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> tuple[None, ...]:
        return (None,) * ctx.num_parameters


def joined(parameters: Sequence[nn.Parameter]) -> torch.Tensor:
    """A scalar that joins these parameters, in one call for all: a third of a us for each."""
    with torch.enable_grad():
        return cast("torch.Tensor", Joint.apply(*parameters))  # type: ignore[no-untyped-call]


def check(ddp: DistributedDataParallel) -> None:
    """Raise if gradients could not be kept exact on `ddp`."""
    if ddp._delay_all_reduce_params:
        raise GradSyncError(
            "gradsync needs to hold a model's gradients back, but this DistributedDataParallel was made with "
            "delay_all_reduce_named_params, which synchronises those parameters in every backward. "
            "Leave that argument out."
        )
    if ddp_finalizes_by_hand(ddp):
        raise GradSyncError(
            "gradsync needs a backward to end its own reductions, but this DistributedDataParallel's "
            "require_manual_backward_finalization is True, which leaves that to its user. Leave it False."
        )
    if not is_alive(ddp.process_group):  # pyright: ignore[reportArgumentType]
        raise GradSyncError(
            "A model on DistributedDataParallel needs the process group that it was wrapped with, but that one has "
            "ended. Wrap the model anew in the group that there is now: gradsync.ddp(model.module)."
        )
    if any(hasattr(parameter, "_st_info") for parameter in ddp._module_parameters):
        raise GradSyncError(
            "gradsync needs a model's parameters to stay where they are, but this DistributedDataParallel is of a "
            "tensor-parallel model (device_mesh=), and each of its forwards puts others in their place. Use "
            "fully_shard, or replicate, on the mesh's other dimension."
        )
    here = set(map(id, ddp.module.parameters()))
    gone = [parameter for parameter in ddp._module_parameters if id(parameter) not in here]
    if gone:
        raise GradSyncError(
            f"DistributedDataParallel reduces the parameters that its module had when it was wrapped, but {len(gone)} "
            f"of them, of shape {', '.join(str(list(p.shape)) for p in gone[:3])}, are no longer in the module. Wrap "
            "the model anew, and make the optimizer from its parameters: gradsync.ddp(model.module)."
        )


_LAYOUT = torch.Tensor.stride


def is_built_for(ddp: DistributedDataParallel, reduced: Sequence[nn.Parameter]) -> bool:
    """Whether the reducer was made for exactly these parameters, in their present form."""
    known = vars(ddp).get("_gradsync_reduced")
    if known is not None:
        return bool(known == tuple(map(likeness, reduced))) and is_wired(ddp, reduced)
    if len(reduced) != ddp._get_ddp_logging_data()["num_parameter_tensors"]:
        return False
    if not _are_held(reduced) or any(map(is_resized, reduced)):
        return False
    if not all(parameter.is_contiguous() for parameter in reduced):
        return False  # it may have been made before `channels_last`, and does not tell
    if len(reduced) == len(ddp._module_parameters):
        return True
    # The number is right, but they may be others: the buckets tell.
    inside = {id(p) for bucket in ddp.reducer._get_zeros_like_grad_buckets() for p in bucket.parameters()}
    return inside == set(map(id, reduced))


def likeness(parameter: nn.Parameter) -> tuple[Any, ...]:
    """What a reducer depends on in a parameter. The id is safe, because DDP holds the parameter."""
    return id(parameter), parameter.dtype, parameter.device, parameter.shape


def nodes_of(parameters: Sequence[nn.Parameter]) -> tuple[Any, ...]:
    """The nodes in which autograd accumulates each gradient; None for a frozen parameter."""
    joint = joined(parameters)  # kept until its node has been read, which torch 2.9 needs
    return tuple(node for node, _ in joint.grad_fn.next_functions) if joint.grad_fn is not None else ()


def own_names(root: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """The parameters of a model by DDP's names, which begin with a dot for those of the model itself."""
    for where, module in root.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            yield f"{where}.{name}", parameter


def _are_held(parameters: Sequence[nn.Parameter]) -> bool:
    """Whether something holds these parameters' nodes, as a reducer does: else autograd makes new ones each time."""
    for node in nodes_of(parameters):
        node.metadata["gradsync"] = True
    return all(node.metadata.pop("gradsync", False) for node in nodes_of(parameters))


def is_wired(ddp: DistributedDataParallel, reduced: Sequence[nn.Parameter]) -> bool:
    """Whether autograd still uses the nodes on which the reducer put its hooks, and the layouts are what they were.

    Autograd makes a new node when a parameter is cast, even if it is cast back, and when `set_` gives it another
    storage, as parametrizations do. After the last two the parameter looks as before. With another layout, as of
    `channels_last`, the reducer writes gradients into its buckets in one order and reads them in another.
    """
    known = WIRES.get(ddp)
    if known is None:
        return True
    parameters, nodes, layouts = known
    if len(parameters) != len(reduced) or any(a is not b for a, b in zip(parameters, reduced, strict=True)):
        return False  # another function saw some of them frozen, and the reducer was rebuilt
    if layouts != [*map(_LAYOUT, reduced)]:
        return False
    now = nodes_of(reduced)
    return not now or all(a is b or a is None or b is None for a, b in zip(nodes, now, strict=True))


def note_wires(ddp: DistributedDataParallel, reduced: Sequence[nn.Parameter]) -> None:
    """Remember what the reducer was built for, and the nodes that have its hooks."""
    vars(ddp)["_gradsync_reduced"] = tuple(map(likeness, reduced))
    if reduced:
        WIRES[ddp] = tuple(reduced), nodes_of(reduced), [*map(_LAYOUT, reduced)]


def is_resized(parameter: nn.Parameter) -> bool:
    """Whether a parameter's node was made for another shape; a node lives as long as something holds it."""
    shape = get_gradient_edge(parameter).node._input_metadata[0].shape
    return tuple(shape) != tuple(parameter.shape)


def insist_on_shapes(parameters: Iterable[nn.Parameter]) -> None:
    """Raise if autograd has a node of another shape, before a backward fails with torch's message."""
    resized = [parameter for parameter in parameters if is_resized(parameter)]
    if resized:
        raise GradSyncError(
            "A parameter must not be resized in place while something holds its node in autograd's graph, such as a "
            f"DistributedDataParallel, a loss or a hook of yours, but {len(resized)} were, which now have the shape "
            f"{', '.join(str(list(p.shape)) for p in resized[:3])}. Put a new nn.Parameter in its place, and make the "
            "optimizer and the wrapper anew."
        )


def sparse_parameters(module: nn.Module) -> frozenset[int]:
    embeddings = (one for one in module.modules() if isinstance(one, nn.Embedding | nn.EmbeddingBag) and one.sparse)
    return frozenset(id(one.weight) for one in embeddings)
