"""FSDP1: `FullyShardedDataParallel`, the module that wraps.

Its `no_sync` is read as a backward ends, where DDP's is read in forward, and is for the root only. The switch that it
writes, `_sync_gradients` of each instance, is written here.

Private in torch (read in torch 2.13; `tests/test_engines_torch.py` fails when it changes): of an instance
`_sync_gradients`, `_handle`, `_is_root`, `_all_fsdp_states`, `training_state`, `process_group`, `_inter_node_pg`,
`_post_backward_callback_queued`, `_post_backward_stream`, `_all_reduce_stream`, `_device_handle`; of a handle
`flat_param`, `uses_sharded_strategy`, `device`, `_reduce_dtype`, `_training_state`, `prepare_gradient_for_optim`,
`_get_unflat_views`, `_use_unsharded_grad_views`, `_use_sharded_grad_views`; of a flat parameter `_params`, `_shapes`,
`_shard_param_infos`, `_unpadded_unsharded_size`, `_saved_grad_shard`, `_post_backward_called`; and of `_runtime_utils`
`_lazy_init`, `_post_backward_final_callback`, `_reduce_grad`, `_reduce_grad_no_shard` and `_reshard`.

A held gradient is the flat parameter's, of its whole size; a reduced one has the size of this rank's shard.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, _runtime_utils
from torch.distributed.fsdp._common_utils import HandleTrainingState, TrainingState

from gradsync._errors import GradSyncError
from gradsync.engines._protocol import Engine

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import nn
    from torch.distributed.fsdp._flat_param import FlatParameter, FlatParamHandle

_HYBRID = (ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2)


class FSDP1Engine(Engine):
    """One root `FullyShardedDataParallel`, and all others below it."""

    forward_communicates = True
    holds_inside = True

    def __init__(self, module: FullyShardedDataParallel) -> None:
        # Any, because nn.Module types all attributes of its own as tensors or modules.
        self._root: Any = module
        self._instances: list[Any] = [one for one in module.modules() if isinstance(one, FullyShardedDataParallel)]
        self._owners: dict[FlatParamHandle, Any] = {one._handle: one for one in self._instances if one._handle}
        self.modules = self._instances
        self._handles = list(self._owners)
        self._hybrid = module.sharding_strategy in _HYBRID
        if any(handle.uses_sharded_strategy for handle in self._handles):
            self.shard_group = module.process_group
        self._mesh_group: dist.ProcessGroup | None = None
        self._held: dict[FlatParamHandle, tuple[torch.Tensor, int]] = {}
        assert module.process_group is not None, "it has been wrapped"
        super().__init__(
            module.process_group,
            [p for handle in self._handles for p in (handle.flat_param._params or [handle.flat_param])],
        )

    @property
    def group(self) -> dist.ProcessGroup:
        # Made when it is asked for: `no_sync` needs none, and need not be collective.
        if self._mesh_group is None:
            self._mesh_group = _whole_group(self._root) if self._hybrid else self._group
        return self._mesh_group

    @property
    def leaves(self) -> Sequence[torch.Tensor]:
        return [handle.flat_param for handle in self._handles]

    def num_held(self) -> int:
        return sum(parameter.grad is not None for parameter in self.parameters)

    def held_gradients(self) -> dict[nn.Parameter, torch.Tensor]:
        held: dict[nn.Parameter, torch.Tensor] = {}
        for handle in self._handles:
            if getattr(handle.flat_param, "_saved_grad_shard", None) is not None:
                raise GradSyncError(
                    "A state in the middle of a window holds each gradient as one sync leaves it, but this window was "
                    "loaded from a state of another sync and has gone on since then, so that there are two. Save at a "
                    "boundary, where progress.index is 0."
                )
            if handle.flat_param.grad is not None:
                parts = _parts(handle, handle.flat_param.grad)
                held.update((parameter, part) for parameter, part in parts.items() if parameter.requires_grad)
        return held

    def load_held(self, gradients: Mapping[nn.Parameter, torch.Tensor]) -> None:
        for parameter in (*self.parameters, *self.leaves):
            parameter.grad = None
        for handle in self._handles:
            flat = handle.flat_param
            own = flat._params or [flat]
            shapes = flat._shapes if flat._params else [flat._unpadded_unsharded_size]
            came = [(gradients[p], shape) for p, shape in zip(own, shapes, strict=True) if p in gradients]
            if not came:
                continue
            reduced = any(gradient.dim() > len(shape) for gradient, shape in came)
            dtype = came[0][0].dtype
            size = flat.shape if reduced else flat._unpadded_unsharded_size
            gradient = torch.zeros(size, dtype=dtype, device=handle.device)
            for parameter, part in _parts(handle, gradient).items():
                if parameter in gradients:
                    part.copy_(gradients[parameter])
            flat.grad = torch.empty_like(flat)
            flat.grad.data = gradient  # of another size and type than the shard, as after a held backward
            if flat._params and reduced:
                handle._use_sharded_grad_views()
            elif flat._params:  # without gradients there, the next forward would drop the flat one
                handle._use_unsharded_grad_views()

    # -- micro-batch ----------------------------------------------------------------------------------------------

    def hold(self) -> list[bool]:
        return self._switch([False] * len(self._instances))

    def restore(self, found: list[bool]) -> None:
        self._switch(found)

    # -- boundary -------------------------------------------------------------------------------------------------

    def arm(self, loss: torch.Tensor | None) -> None:  # noqa: ARG002 - whatever reaches a flat parameter reduces it
        self._switch([True] * len(self._instances))
        self._held = {}
        for handle in self._handles:
            if handle.flat_param.grad is not None and _is_whole(handle.flat_param, handle.flat_param.grad):
                self._held[handle] = (handle.flat_param.grad, handle.flat_param.grad._version)
                # Set by a held backward, it would make FSDP insist on a gradient from the coming one.
                handle.flat_param._post_backward_called = False

    def settle(self) -> None:
        # What only earlier micro-batches used, that backward has left as it was.
        for handle, (gradient, version) in reversed(self._held.items()):
            if handle.flat_param.grad is gradient and gradient._version == version:
                self._reduce_held(handle)
        self._held = {}

    def abort(self) -> None:
        """The other ranks wait in a gather of this rank's parameters, and cannot be helped from here."""

    def reduce(self) -> None:
        for handle in reversed(self._handles):
            if handle.flat_param.grad is not None and _is_whole(handle.flat_param, handle.flat_param.grad):
                self._reduce_held(handle)

    def discard(self) -> None:
        for handle in self._handles:
            flat = handle.flat_param
            flat.grad = None
            for parameter in flat._params or ():
                parameter.grad = None
            if hasattr(flat, "_saved_grad_shard"):
                del flat._saved_grad_shard
        if not self._root._is_root:
            return  # no forward has been, or another root is above
        for handle, owner in self._owners.items():  # which FSDP itself does not do without sharding
            _runtime_utils._reshard(owner, handle, handle.uses_sharded_strategy)
        if self._is_under_way():
            self._end_backward()

    # -- inside ---------------------------------------------------------------------------------------------------

    def _reduce_held(self, handle: FlatParamHandle) -> None:
        """What the end of a handle's backward does to its gradient."""
        _runtime_utils._lazy_init(self._root, self._root)  # a window that was loaded may end without a forward here
        module, flat = self._owners[handle], handle.flat_param
        assert flat.grad is not None, "held"
        device, stream = module._device_handle, module._post_backward_stream
        states = module.training_state, handle._training_state
        module.training_state = TrainingState.FORWARD_BACKWARD
        handle._training_state = HandleTrainingState.BACKWARD_POST
        stream.wait_stream(device.current_stream())
        with torch.no_grad(), device.stream(stream):
            if flat.grad.dtype != handle._reduce_dtype and not _runtime_utils._low_precision_hook_enabled(module):
                flat.grad.data = flat.grad.to(handle._reduce_dtype)
            if handle.uses_sharded_strategy:
                _runtime_utils._reshard(module, handle, True)  # a held backward of SHARD_GRAD_OP does not
                _runtime_utils._reduce_grad(module, handle)
            else:
                _runtime_utils._reduce_grad_no_shard(module, handle)
            flat._post_backward_called = True
            handle.prepare_gradient_for_optim()
            flat._post_backward_called = False
        device.current_stream().wait_stream(stream)
        module.training_state, handle._training_state = states

    def _switch(self, flags: Sequence[bool]) -> list[bool]:
        # Written through __dict__: nn.Module.__setattr__ costs 1.7 us.
        found: list[bool] = []
        for module, flag in zip(self._instances, flags, strict=True):
            state: dict[str, Any] = module.__dict__
            found.append(state["_sync_gradients"])
            state["_sync_gradients"] = flag
        return found

    def _is_under_way(self) -> bool:
        """Whether an exception has left FSDP in the middle of a forward or backward."""
        return self._root._post_backward_callback_queued or any(
            state.training_state is not TrainingState.IDLE for state in self._root._all_fsdp_states
        )

    def _end_backward(self) -> None:
        """What ends each backward: everything is put away, and nothing reduced."""
        found = self.hold()
        try:
            _runtime_utils._post_backward_final_callback(self._root, self._root)
        finally:
            self.restore(found)
        for handle in self._handles:
            handle.flat_param._post_backward_called = False
            handle.flat_param.grad = None


def _is_whole(flat: FlatParameter, gradient: torch.Tensor) -> bool:
    """Whether a gradient is the whole flat parameter's: held, or not sharded at all. The others are reduced."""
    return gradient.shape == flat._unpadded_unsharded_size


def _parts(handle: FlatParamHandle, gradient: torch.Tensor) -> dict[nn.Parameter, torch.Tensor]:
    """Views of a flat gradient by parameter: whole ones, or pieces, which are told by having one dimension more."""
    flat = handle.flat_param
    whole = _is_whole(flat, gradient)
    if flat._params is None:
        return {flat: gradient if whole else gradient.unsqueeze(0)}
    if whole:
        return dict(zip(flat._params, handle._get_unflat_views(gradient), strict=True))
    return {
        parameter: gradient[info.offset_in_shard :][: info.numel_in_shard].view(*[1] * len(shape), -1)
        for parameter, shape, info in zip(flat._params, flat._shapes, flat._shard_param_infos, strict=True)
        if info.in_shard
    }


def _whole_group(module: Any) -> dist.ProcessGroup:
    """The group of both of a hybrid's dimensions."""
    ranks = range(dist.get_world_size())
    if module.process_group.size() * module._inter_node_pg.size() == len(ranks):
        assert dist.group.WORLD is not None, "initialised"
        return dist.group.WORLD
    raise GradSyncError(
        "A hybrid-sharded FullyShardedDataParallel must span all ranks, to be averaged over them, but this one spans "
        f"{module.process_group.size()} x {module._inter_node_pg.size()} of {len(ranks)}. Use fully_shard on a mesh."
    )
