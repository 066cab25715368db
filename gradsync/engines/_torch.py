"""What differs between versions of torch: a function for each difference, so that no engine knows versions.

The functions look at what exists, not at version numbers. Tried with torch 2.9 to 2.15; `docs/torch-versions.md` has
what passed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
    from torch.nn.parallel import DistributedDataParallel


# -- DistributedDataParallel -------------------------------------------------------------------------------------------


def ddp_finalizes_by_hand(ddp: DistributedDataParallel) -> bool:
    """Whether the user must call a method to end each reduction; torch 2.15 and later."""
    return bool(getattr(ddp, "require_manual_backward_finalization", False))


# -- fully_shard: states and groups ------------------------------------------------------------------------------------


def groups_of(state: Any) -> Sequence[FSDPParamGroup]:
    """The parameter groups of a state; until torch 2.11, there is one at most."""
    if hasattr(state, "_fsdp_param_groups"):
        groups: Sequence[FSDPParamGroup] = state._fsdp_param_groups
        return groups
    return [state._fsdp_param_group] if state._fsdp_param_group else []


def can_reduce_unused(groups: Iterable[FSDPParamGroup]) -> bool:
    """Whether a group can reduce zeros for parameters that a micro-batch did not use; torch 2.13 and later."""
    return all(hasattr(group, "reduce_scatter_unused_params") for group in groups)


def read_dtypes(groups: Iterable[FSDPParamGroup]) -> None:
    """Have groups read in which dtypes they reduce: before torch 2.15, one that is frozen as it first runs has none."""
    for group in groups:
        if vars(group).get("_orig_dtype", ...) is None:
            trained = {p.sharded_param.dtype for p in group.fsdp_params if p.sharded_param.requires_grad}
            if len(trained) == 1:  # a teacher may have several, which torch refuses where it trains them
                group._init_mp_dtypes()


def finalizes_by_hand(state: Any) -> bool:
    """Whether the user must call a method to end each backward; torch 2.15 and later."""
    return bool(getattr(state._state_ctx, "manual_backward_finalization", False))


def begin_backward(state: Any) -> None:
    """Set the flag that torch 2.15 sets when a backward begins, and requires when it ends."""
    if getattr(state._state_ctx, "manual_backward_finalization_active", False) is None:
        state._state_ctx.manual_backward_finalization_active = False


def reset_iteration(root: Any) -> None:
    """Bring a root out of a forward or backward that an exception has ended, and keep every gradient.

    torch itself drops partial reductions then, and from 2.15 on all gradients. Nothing is to be done for a root that
    could not even begin its first forward.
    """
    has_begun = "reduce_scatter_states", "reduce_scatter_state"  # until torch 2.12 the second
    if not any(hasattr(root._comm_ctx, name) for name in has_begun):
        return
    groups = [group for state in root._state_ctx.all_states for group in groups_of(state)]
    partial = [(group, group._partial_reduce_output, partial_layout(group)) for group in groups]
    leaves = [leaf for group in groups for param in group.fsdp_params for leaf in _leaves(param)]
    gradients = [leaf.grad for leaf in leaves]
    if hasattr(root, "_reset_iter_state"):
        root._reset_iter_state()
    else:
        _reset_iteration_before_2_13(root)
    for group, output, layout in partial:
        group._partial_reduce_output = output
        set_partial_layout(group, layout)
    for leaf, gradient in zip(leaves, gradients, strict=True):
        leaf.grad = gradient


def _reset_iteration_before_2_13(root: Any) -> None:
    from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState  # here, because it takes seconds

    stream, comm, context = root._device_handle.current_stream(), root._comm_ctx, root._state_ctx
    running: list[Any] = [comm.all_gather_state, *getattr(comm, "reduce_scatter_states", ())]
    comm.all_gather_state = None
    if hasattr(comm, "reduce_scatter_states"):
        comm.reduce_scatter_states.clear()
    else:
        running.append(comm.reduce_scatter_state)
        comm.reduce_scatter_state = None
    _wait_for(stream, running)
    comm.post_forward_order.clear()
    for state in context.all_states:
        state._modules_to_run_forward.clear()
        state._training_state = TrainingState.IDLE
        for group in groups_of(state):
            if group._all_gather_result is not None:
                if group._all_gather_result.all_gather_event is not None:
                    stream.wait_event(group._all_gather_result.all_gather_event)
                if isinstance(group._all_gather_result.all_gather_work, dist.distributed_c10d.Work):
                    group._all_gather_result.all_gather_work.wait()
                group._all_gather_result = None
            if group._post_reduce_event is not None:
                stream.wait_event(group._post_reduce_event)
                group._post_reduce_event = None
            _wait_for(stream, [group._all_reduce_state])
            group._all_reduce_state = None
            group._post_forward_indices.clear()
            group._training_state = TrainingState.IDLE
            group._to_sharded()
    context.iter_forward_root, context.post_backward_final_callback_queued = None, False


def _wait_for(stream: Any, running: Iterable[Any]) -> None:
    for one in running:
        if one is not None and one.event is not None:
            stream.wait_event(one.event)


# -- fully_shard: gradients --------------------------------------------------------------------------------------------

_CAST = "unsharded_accumulated_grad"  # the attribute that has a held gradient in `reduce_dtype`, before torch 2.15


def whole_gradient(param: FSDPParam) -> torch.Tensor | None:
    """A parameter's gradient that is not reduced; before torch 2.15, one that was cast has a place of its own."""
    if param.unsharded_accumulated_grad is not None:
        return param.unsharded_accumulated_grad
    return param._unsharded_param.grad if hasattr(param, "_unsharded_param") else None


def set_whole_gradient(param: FSDPParam, gradient: torch.Tensor | None) -> None:
    """Have a parameter hold this gradient, or none. Before a gradient, its unsharded parameter must be made."""
    if _CAST in vars(param):
        param.unsharded_accumulated_grad = gradient
        gradient = None
    if not hasattr(param, "_unsharded_param"):
        return
    leaf = param._unsharded_param
    if gradient is not None and leaf.grad_dtype is not None:
        gradient = gradient.to(leaf.grad_dtype)
    leaf.grad = gradient


def hold_one_dtype(groups: Iterable[FSDPParamGroup]) -> None:
    """Before groups reduce: where one holds gradients that were cast, its other parameters hold zeros of that dtype.

    A group reduces one dtype only. Before torch 2.15, what the backward brings has another one than what is held, and
    so have the zeros that torch takes for unused parameters.
    """
    for group in groups:
        held = [vars(param).get(_CAST) for param in group.fsdp_params]
        if any(gradient is not None for gradient in held):
            for param, gradient in zip(group.fsdp_params, held, strict=True):
                if gradient is None and param.sharded_param.requires_grad:
                    setattr(param, _CAST, torch.zeros_like(param._unsharded_param, dtype=param.reduce_dtype))


def prepare_unsharded(param: FSDPParam) -> None:
    """Set the dtypes that torch 2.15 needs before it makes an unsharded parameter; it would set them later."""
    if not hasattr(param, "reduce_dtype"):
        param.init_dtype_attrs(param.mp_policy)


Layout = dict["FSDPParam", tuple[int, int]]  # where a parameter's piece begins, and its length with padding


def partial_layout(group: FSDPParamGroup) -> Layout:
    """The layout of a group's partial output; before torch 2.15, all parameters in their order."""
    if hasattr(group, "_partial_reduce_output_layout"):
        return dict(group._partial_reduce_output_layout)  # pyright: ignore[reportAttributeAccessIssue]
    return {} if group._partial_reduce_output is None else new_layout(group)


def new_layout(group: FSDPParamGroup) -> Layout:
    """The layout of a partial output with all trainable parameters, used or not, in the group's order."""
    layout: Layout = {}
    start = 0
    for param in group.fsdp_params:
        # Not the flag of the unsharded one: until its next gather it is off where a bystander's was.
        if hasattr(param, "_unsharded_param") and param.sharded_param.requires_grad:
            layout[param] = start, param._sharded_param_data.numel()
            start += param._sharded_param_data.numel()
    return layout


def set_partial_layout(group: FSDPParamGroup, layout: Layout) -> None:
    """Tell a group the layout of its partial output; before torch 2.15 the layout is implied."""
    if hasattr(group, "_partial_reduce_output_layout"):
        group._partial_reduce_output_layout = dict(layout)  # pyright: ignore[reportAttributeAccessIssue]


def _leaves(param: FSDPParam) -> list[torch.Tensor]:
    return [param.sharded_param, *([param._unsharded_param] if hasattr(param, "_unsharded_param") else ())]
