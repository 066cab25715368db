"""FSDP2: `fully_shard` on one mesh dimension or two (HSDP), and the `replicate` that is made of the same parts.

Each parameter group has a flag that says whether a backward reduces, and reads it when the backward ends there. The
setters of `FSDPModule` walk all modules (110 us for 241 of them); here the groups are known, and the flag is set
directly.

States, groups and their parameters refer to the modules. They are held weakly, so that an engine that is kept somewhere
does not keep its model alive.

`_torch_privates.py` lists what is private in torch here, and `_torch.py` has what differs between versions. Held
gradients are at `_unsharded_param`, and before torch 2.15 at `unsharded_accumulated_grad`, where `zero_grad()` does not
reach them.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, TrainingState

from gradsync.engines import _fsdp2_checkpoint, _torch
from gradsync.engines._fsdp2_refused import insist_on_shards, refuse_other_reductions
from gradsync.engines._fsdp2_use import Use
from gradsync.engines._mesh import one_dimension, other_dimensions, whole_group
from gradsync.engines._protocol import Engine, trained_alike
from gradsync.engines._torch_privates import check_torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from torch import nn
    from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

_Undo = list[tuple["FSDPParamGroup", dict[str, Any]]]


class FSDP2Engine(Engine):
    """One root of `fully_shard` or of FSDP's `replicate`, and all such modules below it."""

    forward_communicates = True
    holds_inside = True

    def __init__(self, module: FSDPModule) -> None:
        assert isinstance(module, torch.nn.Module), "fully_shard made it of one"
        wrapped = [part for part in module.modules() if isinstance(part, FSDPModule)]
        states = list(dict.fromkeys(part._get_fsdp_state() for part in wrapped))
        groups = _groups_of(states)
        self._state_refs = [weakref.ref(state) for state in states]
        self._group_refs = [weakref.ref(group) for group in groups]
        self._group = one_dimension(groups)
        self._mesh_group: dist.ProcessGroup | None = None
        self._undo: list[_Undo] = []
        self._is_prepared = False
        self._use = Use(self, groups)
        self._before: dict[int, object] = {}  # what `_reduced` was as the backward that synchronises began
        for group in groups[:1]:
            check_torch("fsdp2", state=states[0], group=group, param=group.fsdp_params[0])

    @property
    def _states(self) -> list[Any]:
        return [state for ref in self._state_refs if (state := ref()) is not None]

    @property
    def _roots(self) -> dict[int, list[Any]]:
        """The states by their root: a layer that came after the first forward (a new head) is a root of its own."""
        by_context: dict[int, list[Any]] = {}
        for state in self._states:
            by_context.setdefault(id(state._state_ctx), []).append(state)
        return by_context

    @property
    def _groups(self) -> list[FSDPParamGroup]:
        return [group for ref in self._group_refs if (group := ref()) is not None]

    @property
    def _params(self) -> list[FSDPParam]:
        return [param for group in self._groups for param in group.fsdp_params]

    @property
    def modules(self) -> Sequence[nn.Module]:  # type: ignore[override]
        return [module for state in self._states for module in state._modules]

    @property
    def parameters(self) -> Sequence[nn.Parameter]:  # type: ignore[override]
        return [param.sharded_param for param in self._params]

    @property
    def group(self) -> dist.ProcessGroup:
        # Made when it is first asked for, because that is collective: `no_sync` needs no group, and must not be.
        if self._mesh_group is None:
            self._mesh_group = whole_group(self._groups) or self._group
        return self._mesh_group

    @property
    def twins(self) -> Sequence[dist.ProcessGroup]:  # type: ignore[override]
        return other_dimensions(self._groups)

    @property
    def leaves(self) -> Sequence[torch.Tensor]:
        _make_unsharded(self._params)
        for state in self._states:
            # A parameter with its own all-gather (float8) is made by the first one only. All ranks are here then.
            if not all(hasattr(p, "_unsharded_param") for group in _torch.groups_of(state) for p in group.fsdp_params):
                state._modules[0].unshard()
                state._modules[0].reshard()
        return [trained_alike(param._unsharded_param, [param.sharded_param]) for param in self._params]

    @property
    def gathered(self) -> dict[torch.Tensor, nn.Parameter]:
        there = ((param._module_info, param) for g in self._groups if not g.is_sharded for param in g.fsdp_params)
        return {getattr(info.module, info.param_name): param.sharded_param for info, param in there}

    def num_held(self) -> int:
        return _num_held(self._groups)

    def held_gradients(self) -> dict[nn.Parameter, torch.Tensor]:
        return _fsdp2_checkpoint.take(self._groups, self._use)

    def load_held(self, gradients: Mapping[nn.Parameter, torch.Tensor]) -> None:
        groups, params = self._groups, self._params
        if pieces := _fsdp2_checkpoint.check_pieces(params, gradients):
            insist_on_shards(groups)
        _make_unsharded(params)
        _fsdp2_checkpoint.put(groups, gradients)
        if self._use.is_noted or pieces:
            self._use.begin(params, self.leaves)
            self._use.add(param for param, piece in pieces.items() if len(piece))

    def ungather(self) -> None:
        if self._is_under_way():
            self._recover()
        for group in self._groups:
            if not group.is_sharded and group._training_state is TrainingState.IDLE:
                _carry_flags(group.fsdp_params)
                group._to_sharded()

    def trainable(self) -> bool:
        refuse_other_reductions(self._groups, self._states)
        _torch.read_dtypes(self._groups)
        for param in self._params:
            vars(param)[_TRAINED] = param.sharded_param.requires_grad
        if self._use.is_noted:  # newly trainable parameters too
            self._use.begin(self._params, self.leaves)
        return super().trainable()

    # -- micro-batch ----------------------------------------------------------------------------------------------

    def hold(self) -> tuple[list[tuple[FSDPParamGroup, bool]], int]:
        groups = self._groups
        if not self._is_prepared:
            # Before torch 2.15, a held backward fails at its end if reduce_dtype is set and a module has never run.
            _make_unsharded(p for p in self._params if p.mp_policy.reduce_dtype is not None)
            self._is_prepared = True
        found = [(group, group.reduce_grads) for group in groups]
        for group in groups:
            group.reduce_grads = False
        return found, len(self._undo)

    def hold_shards(self) -> tuple[list[tuple[FSDPParamGroup, bool]], int]:
        groups = [group for group in self._groups if isinstance(group.mesh_info, FSDPMeshInfo)]
        insist_on_shards(groups)
        found = self.hold()
        self._note_use()
        # The ranks that share shards must reduce the same parameters together. So they reduce all of them in each
        # micro-batch, with zeros for those that it did not use.
        self._switch(groups, reduce_grads=True, all_reduce_grads=False, reduce_scatter_unused_params=True)
        return found

    def restore(self, found: tuple[list[tuple[FSDPParamGroup, bool]], int]) -> None:
        flags, depth = found
        self._put_back(depth)
        for group, flag in flags:
            group.reduce_grads = flag

    def before_frozen(self) -> Callable[[], None]:
        return lambda: _torch.read_dtypes(self._groups)

    # -- boundary -------------------------------------------------------------------------------------------------

    def arm(self, loss: torch.Tensor | None) -> None:  # noqa: ARG002 - whatever reaches a group reduces it
        # With reshard_after_backward off, parameters stay gathered between the micro-batches of a window. After the
        # boundary they would be those from before the update.
        groups = self._groups
        self._switch(groups, reduce_grads=True, all_reduce_grads=True, reshard_after_backward=True)
        self._note_use()
        # A group reduces the parameters that have a gradient here, and mixes them up with others where another rank has
        # used others. So all ranks reduce all of them, once, with zeros for those that they did not use.
        if _torch.can_reduce_unused(groups):
            self._switch(groups, reduce_scatter_unused_params=True)
            _torch.hold_one_dtype(groups)
        self._before = self._reduced()

    def finish(self) -> None:
        # This backward may not have come to modules below a root, which earlier ones, or other ranks, have used.
        missed = self._reduced().items() & self._before.items() if _torch.can_reduce_unused(self._groups) else ()
        keys = {key for key, _ in missed}
        self._finish(states for key, states in self._roots.items() if key in keys or _num_held(_groups_of(states)))
        self._use.drop_unused(self._groups, self.group)

    def abort(self) -> None:
        # The other ranks wait in a gather of this rank's parameters, and nothing here can end that.
        pass

    def reduce(self) -> None:
        depth = len(self._undo)
        self.arm(None)
        _make_unsharded(self._params)
        for state in self._states:
            state._lazy_init()  # those of the first root with it, and those that came later each by itself
        try:
            self._finish(self._roots.values())
        finally:
            self._put_back(depth)
        self._use.drop_unused(self._groups, self.group)

    def discard(self) -> None:
        self._use.clear()
        # First, because what a failed backward was still reducing arrives in gradients.
        if self._is_under_way() or self._has_run_forward():
            self._recover()
        for group in self._groups:
            group._partial_reduce_output = None
            _torch.set_partial_layout(group, {})
            for param in group.fsdp_params:
                _torch.set_whole_gradient(param, None)
                param.sharded_param.grad = None
        self.ungather()

    # -- inside ---------------------------------------------------------------------------------------------------

    def _is_under_way(self) -> bool:
        """Whether FSDP is in the middle of a forward or backward, or an exception has left it there."""
        return any(
            state._state_ctx.iter_forward_root is not None
            or state._state_ctx.post_backward_final_callback_queued
            or state._training_state is not TrainingState.IDLE
            for state in self._states
        )

    def _has_run_forward(self) -> bool:
        """Whether a forward has recorded its order for a backward that has not run."""
        return any(getattr(state._comm_ctx, "post_forward_order", ()) for state in self._states)

    def _recover(self) -> None:
        """Bring FSDP out of a forward or backward, and keep what its groups hold."""
        for states in self._roots.values():
            all_states = states[0]._state_ctx.all_states
            _torch.reset_iteration(next((state for state in all_states if state._is_root), states[0]))

    def _finish(self, roots: Iterable[list[Any]]) -> None:
        """Run what ends each backward under these roots: the groups reduce what they hold, and reshard."""
        mine = set(self._groups)
        for state, *_ in [*roots]:
            state._lazy_init()
            depth = len(self._undo)
            others = [group for group in _groups_of(state._state_ctx.all_states) if group not in mine]
            self._switch(others, reduce_grads=False)
            _torch.begin_backward(state)
            try:
                state._root_post_backward_final_callback()
            finally:
                self._put_back(depth)

    def _note_use(self) -> None:
        """Note from now on which parameters are used. Partial outputs that are there before are the user's own."""
        if not self._use.is_noted:
            self._use.begin(self._params, self.leaves)
            partly = (group for group in self._groups if group._partial_reduce_output is not None)
            self._use.add(param for group in partly for param in group.fsdp_params)

    def _reduced(self) -> dict[int, object]:
        """By root, what changes whenever its groups reduce: the first trained gradient, and its version."""
        found: dict[int, object] = {}
        for key, states in self._roots.items():
            params = (param for group in _groups_of(states) for param in group.fsdp_params)
            first: Any = next((param.sharded_param for param in params if param.sharded_param.requires_grad), None)
            if first is not None and states[0]._is_root is not None:  # else it has nothing to train, or has never run
                found[key] = None if first.grad is None else (id(first.grad), first.grad._local_tensor._version)
        return found

    def _switch(self, groups: Iterable[FSDPParamGroup], **flags: bool) -> None:
        undo: _Undo = []
        for group in groups:
            undo.append((group, {name: getattr(group, name) for name in flags}))
            group.__dict__.update(flags)
        self._undo.append(undo)

    def _put_back(self, depth: int) -> None:
        """Undo what `_switch` has set since `depth`."""
        while len(self._undo) > depth:
            for group, flags in self._undo.pop():
                group.__dict__.update(flags)


def _groups_of(states: Iterable[Any]) -> list[FSDPParamGroup]:
    return [group for state in states for group in _torch.groups_of(state)]


def _num_held(groups: Iterable[FSDPParamGroup]) -> int:
    return sum(
        (group._partial_reduce_output is not None)
        + sum(_torch.whole_gradient(param) is not None for param in group.fsdp_params)
        for group in groups
    )


# Whether a parameter was trained as a window was last opened: on torch's record of it, which goes with the model.
_TRAINED = "_gradsync_trained"


def _carry_flags(params: Iterable[FSDPParam]) -> None:
    """FSDP would forget that gathered layers were frozen or unfrozen. What was switched at a parameter stays."""
    for param in params:
        own, gathered = param.sharded_param, getattr(param._module_info.module, param._module_info.param_name)
        if own.requires_grad == vars(param).get(_TRAINED, own.requires_grad):
            own.requires_grad_(gathered.requires_grad)


def _make_unsharded(params: Iterable[FSDPParam]) -> None:
    """Make what the first gather would make, without the data."""
    for param in params:
        if hasattr(param, "_unsharded_param") or hasattr(param._sharded_local_tensor, "fsdp_pre_all_gather"):
            continue
        dtype = param.mp_policy.param_dtype
        if dtype is None or not param.sharded_param.is_floating_point():
            dtype = param.sharded_param.dtype
        info = param.mesh_info
        num_shards = info.shard_mesh_size if isinstance(info, FSDPMeshInfo) else 1
        numel = param._sharded_param_data.numel()
        _torch.prepare_unsharded(param)
        param.init_all_gather_outputs([numel], [dtype], num_shards, param.device)
        param.init_unsharded_param()
        param.free_unsharded_param()
