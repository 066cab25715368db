"""FSDP1: `FullyShardedDataParallel`, the module that wraps.

FSDP reads its `no_sync` when a backward ends (DDP reads its own in the forward), and allows it on the root only. So the
flag that `no_sync` sets, `_sync_gradients` of each instance, is set here directly.

`_torch_privates.py` lists what is private in torch here. Instances and handles refer to the modules. They are held
weakly, so that an engine that is kept somewhere does not keep its model alive.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, _runtime_utils
from torch.distributed.fsdp._common_utils import HandleTrainingState, TrainingState

from gradsync._errors import GradSyncError
from gradsync.engines._fsdp1_flat import (
    forget_hook,
    has_run,
    holds_whole,
    is_gathered,
    is_whole,
    own,
    parts,
    set_aside,
    set_gradient,
    views,
)
from gradsync.engines._protocol import Engine, trained_alike
from gradsync.engines._torch_privates import check_torch

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import nn
    from torch.distributed.fsdp._flat_param import FlatParamHandle

_Switches = list[tuple[Any, bool]]  # of instances

_HYBRID = (ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2)


class FSDP1Engine(Engine):
    """One root `FullyShardedDataParallel`, and all others below it."""

    forward_communicates = True
    holds_inside = True
    swaps_storage = True

    def __init__(self, module: FullyShardedDataParallel) -> None:
        instances = [part for part in module.modules() if isinstance(part, FullyShardedDataParallel)]
        self._root_ref = weakref.ref(module)
        self._instance_refs = [weakref.ref(instance) for instance in instances]
        self._hybrid = module.sharding_strategy in _HYBRID
        assert module.process_group is not None, "it has been wrapped"
        self._group = module.process_group
        self._mesh_group: dist.ProcessGroup | None = None
        self._held: dict[FlatParamHandle, tuple[torch.Tensor, int]] = {}  # between arming and settling
        self.shard_group = module.process_group
        for handle in self._handles[:1]:
            check_torch("fsdp1", module=module, handle=handle, runtime=_runtime_utils)

    @property
    def _root(self) -> Any:
        root = self._root_ref()
        assert root is not None, "the caller holds the module"
        return root

    @property
    def _instances(self) -> list[Any]:
        # Any, because the attributes of an nn.Module are typed as tensors or modules.
        return [instance for ref in self._instance_refs if (instance := ref()) is not None]

    @property
    def _owners(self) -> dict[FlatParamHandle, Any]:
        return {instance._handle: instance for instance in self._instances if instance._handle}

    @property
    def _handles(self) -> list[FlatParamHandle]:
        return list(self._owners)

    @property
    def modules(self) -> Sequence[nn.Module]:  # type: ignore[override]
        return self._instances

    @property
    def parameters(self) -> Sequence[nn.Parameter]:  # type: ignore[override]
        # A flat parameter refers to its modules, so it is not kept here either.
        return [parameter for handle in self._handles for parameter in own(handle)]

    @property
    def in_pieces(self) -> Sequence[nn.Parameter]:
        return [parameter for handle in self._handles if handle.uses_sharded_strategy for parameter in own(handle)]

    @property
    def group(self) -> dist.ProcessGroup:
        # Made when it is first asked for, because that is collective: `no_sync` needs no group, and must not be.
        if self._mesh_group is None:
            self._mesh_group = _whole_group(self._root) if self._hybrid else self._group
        return self._mesh_group

    @property
    def leaves(self) -> Sequence[torch.Tensor]:
        return [trained_alike(handle.flat_param, own(handle)) for handle in self._handles]

    @property
    def gathered(self) -> dict[torch.Tensor, nn.Parameter]:
        return {view: parameter for handle in self._handles for view, parameter in views(handle)}

    @property
    def emptied(self) -> set[nn.Module]:
        flat = [handle.flat_param for handle in self._handles if handle.flat_param._params is None]
        return {info.module for one in flat for info in (*one._param_infos, *one._shared_param_infos)}

    def num_held(self) -> int:
        # A gradient that is not reduced yet; a reduced one is in the parameters, like any other engine's.
        held = [one for one in self._handles if one.uses_sharded_strategy and holds_whole(one.flat_param)]
        return sum(parameter.grad is not None for handle in held for parameter in own(handle))

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
                each = parts(handle, handle.flat_param.grad).items()
                held.update((parameter, part) for parameter, part in each if parameter.requires_grad)
        return held

    def load_held(self, gradients: Mapping[nn.Parameter, torch.Tensor]) -> None:
        for parameter in (*self.parameters, *self.leaves):
            parameter.grad = None
        for handle in self._handles:
            flat = handle.flat_param
            shapes = flat._shapes if flat._params else [flat._unpadded_unsharded_size]
            came = [(gradients[p], shape) for p, shape in zip(own(handle), shapes, strict=True) if p in gradients]
            if not came:
                continue
            reduced = any(gradient.dim() > len(shape) for gradient, shape in came)
            dtype = came[0][0].dtype
            size = flat.shape if reduced else flat._unpadded_unsharded_size
            # A shard is where its parameter is; an offloaded parameter computes on another device.
            gradient = torch.zeros(size, dtype=dtype, device=flat.device if reduced else handle.device)
            for parameter, part in parts(handle, gradient).items():
                if parameter in gradients:
                    part.copy_(gradients[parameter])
            set_gradient(flat, gradient)
            if flat._params and reduced:
                handle._use_sharded_grad_views()
            elif flat._params:  # without gradients at these, the next forward would drop the flat one
                handle._use_unsharded_grad_views()

    def ungather(self) -> None:
        # Only the parameters go back into their modules. What is gathered is not freed, so no rank gathers it again.
        for handle, owner in self._owners.items():
            if handle._training_state is not HandleTrainingState.IDLE:
                continue
            if any(views(handle)):
                _runtime_utils._reshard(owner, handle, False)
            # A forward of frozen parameters leaves a hook for the backward of its inputs. Where these need no gradient,
            # none comes, and the next trained forward would take this hook for its own.
            if len(getattr(handle.flat_param, "_post_backward_hook_state", ())) == 1:
                forget_hook(handle.flat_param)

    # -- micro-batch ----------------------------------------------------------------------------------------------

    def hold(self) -> _Switches:
        return self._switch(on=False)

    def restore(self, found: _Switches) -> None:
        for module, flag in found:
            module.__dict__["_sync_gradients"] = flag
        self.ungather()  # else the next forward would take views that this one has left for new parameters

    def before_frozen(self) -> Callable[[], None]:
        kept = [set_aside(handle) for handle in self._handles if handle._training_state is HandleTrainingState.IDLE]

        def put_back() -> None:
            for one in kept:
                one()

        return put_back

    # -- boundary -------------------------------------------------------------------------------------------------

    def arm(self, loss: torch.Tensor | None) -> None:  # noqa: ARG002 - whatever reaches a flat parameter reduces it
        self._switch(on=True)
        self._held = {}
        for handle in self._handles:
            gradient = handle.flat_param.grad
            if gradient is not None and is_whole(handle.flat_param, gradient):
                self._held[handle] = (gradient, gradient._version)
                # A held backward has set it. FSDP would then insist on a gradient from the next backward.
                handle.flat_param._post_backward_called = False

    def finish(self) -> None:
        # The backward has not changed gradients that only earlier micro-batches made.
        for handle, (gradient, version) in reversed(self._held.items()):
            if handle.flat_param.grad is gradient and gradient._version == version:
                self._reduce_held(handle)
        self._held = {}
        self._free_gathered()

    def abort(self) -> None:
        # The other ranks wait in a gather of this rank's parameters, and nothing here can end that.
        self._held = {}

    def reduce(self) -> None:
        for handle in reversed(self._handles):
            if holds_whole(handle.flat_param):
                self._reduce_held(handle)
        self._free_gathered()

    def discard(self) -> None:
        self._held = {}
        for handle in self._handles:
            flat = handle.flat_param
            flat.grad = None
            for parameter in flat._params or ():
                parameter.grad = None
            if hasattr(flat, "_saved_grad_shard"):
                del flat._saved_grad_shard
            forget_hook(flat)  # of a forward whose backward never came: a layer may be frozen before the next
        root = self._root_ref()
        if root is None or not root._is_root:
            return  # the model is gone, no forward has run, or another root is above
        for handle, owner in self._owners.items():
            if not handle.uses_sharded_strategy or has_run(handle):  # without sharding, FSDP itself does not
                _runtime_utils._reshard(owner, handle, handle.uses_sharded_strategy)
        if self._is_under_way():
            self._end_backward()

    # -- inside ---------------------------------------------------------------------------------------------------

    def _reduce_held(self, handle: FlatParamHandle) -> None:
        """Reduce a handle's gradient, as the end of its backward does."""
        root = self._root
        _runtime_utils._lazy_init(root, root)  # a loaded window may end without a forward on this rank
        module, flat = self._owners[handle], handle.flat_param
        assert flat.grad is not None, "held"
        device, stream = module._device_handle, module._post_backward_stream
        states = module.training_state, handle._training_state
        module.training_state = TrainingState.FORWARD_BACKWARD
        handle._training_state = HandleTrainingState.BACKWARD_POST
        current = device.current_stream()
        stream.wait_stream(current)
        with torch.no_grad(), device.stream(stream):
            if flat.grad.dtype != handle._reduce_dtype and not _runtime_utils._low_precision_hook_enabled(module):
                flat.grad.data = flat.grad.to(handle._reduce_dtype)
            if handle.uses_sharded_strategy:
                _runtime_utils._reshard(module, handle, True)  # a held backward of SHARD_GRAD_OP has not
                _runtime_utils._reduce_grad(module, handle)
            else:
                _runtime_utils._reduce_grad_no_shard(module, handle)
        # As at the end of a backward: what comes next (a cast of the gradient, the optimizer) runs on the current
        # stream, and must wait for the stream on which a hybrid's replicas are added up.
        current.wait_stream(stream)
        if module._all_reduce_stream is not current:
            current.wait_stream(module._all_reduce_stream)
        if module.cpu_offload.offload_params:
            current.synchronize()  # the copy to the CPU is asynchronous
        with torch.no_grad():
            flat._post_backward_called = True
            handle.prepare_gradient_for_optim()
            flat._post_backward_called = False
        module.training_state, handle._training_state = states

    def _free_gathered(self) -> None:
        """Free what a forward without a backward has gathered: FSDP would go on with it after the update."""
        for handle, owner in self._owners.items():
            if handle._training_state is HandleTrainingState.IDLE and is_gathered(handle):
                _runtime_utils._reshard(owner, handle, True)

    def _switch(self, *, on: bool) -> _Switches:
        # Written through __dict__: nn.Module.__setattr__ costs 1.7 us.
        instances = self._instances
        found = [(module, module.__dict__["_sync_gradients"]) for module in instances]
        for module in instances:
            module.__dict__["_sync_gradients"] = on
        return found

    def _is_under_way(self) -> bool:
        """Whether an exception has left FSDP in the middle of a forward or backward."""
        root = self._root
        # The attribute is there from the end of the first forward on.
        return getattr(root, "_post_backward_callback_queued", False) or any(
            state.training_state is not TrainingState.IDLE for state in root._all_fsdp_states
        )

    def _end_backward(self) -> None:
        """Run what ends each backward, without a reduction."""
        found, root = self.hold(), self._root
        try:
            _runtime_utils._post_backward_final_callback(root, root)
        finally:
            self.restore(found)
        for handle in self._handles:
            handle.flat_param._post_backward_called = False
            handle.flat_param.grad = None


def _whole_group(module: Any) -> dist.ProcessGroup:
    """The group of all ranks along both dimensions of a hybrid."""
    ranks = range(dist.get_world_size())
    if module.process_group.size() * module._inter_node_pg.size() == len(ranks):
        assert dist.group.WORLD is not None, "initialised"
        return dist.group.WORLD
    raise GradSyncError(
        "A hybrid-sharded FullyShardedDataParallel must span all ranks, to be averaged over them, but this one spans "
        f"{module.process_group.size()} x {module._inter_node_pg.size()} of {len(ranks)}. Use fully_shard on a mesh."
    )
