"""FSDP2: `fully_shard` on one mesh dimension or two (HSDP), and the `replicate` that is made of the same parts.

Whether a backward reduces is a switch of each parameter group, read as the backward ends there. `FSDPModule`'s own
setters walk all modules (110 us for 241 of them); here the groups are kept, and the switch is an attribute of theirs.

All that is private in torch and needed for this is in this file (read in torch 2.13; `tests/test_engines_torch.py`
fails when it changes):

- `FSDPModule._get_fsdp_state()`; of a state `_modules`, `_fsdp_param_groups`, `_state_ctx`, `_is_root`,
  `_lazy_init`, `_training_state`, `_reset_iter_state`, and `_root_post_backward_final_callback`, which reduces all that
  is accumulated; torch's own pipelining calls it for that, too.
- Of a group `reduce_grads`, `all_reduce_grads`, `reshard_after_backward`, `reduce_scatter_unused_params`,
  `gradient_divide_factor`, `_partial_reduce_output`, `fsdp_params`, `mesh_info`, `is_sharded`, `_to_sharded`.
- Of a parameter `sharded_param`, `unsharded_accumulated_grad`, `_unsharded_param` and what makes it. Held gradients lie
  there, unsharded, where neither `zero_grad()` nor `reset_iter_state()` reaches them. `_sharded_param_data` with its
  padding is as long as the parameter's part of a partial output; `_sharded_local_tensor` has the shape without it, and
  `to_sharded_dtensor` makes a gradient of that. `_module_info` says where it is, `mesh_info`, `device`, `mp_policy`.
"""

from __future__ import annotations

import weakref
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import DDPMeshInfo, FSDPMeshInfo, TrainingState

from gradsync._errors import GradSyncError
from gradsync.engines._protocol import Engine

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

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
        wrapped = [one for one in module.modules() if isinstance(one, FSDPModule)]
        self._states = list(dict.fromkeys(one._get_fsdp_state() for one in wrapped))
        self.modules = [one for state in self._states for one in state._modules]
        self._groups = [group for state in self._states for group in state._fsdp_param_groups]
        self._params = [param for group in self._groups for param in group.fsdp_params]
        self._undo: list[_Undo] = []
        self._mesh_group: dist.ProcessGroup | None = None
        self._complete = False
        self._watches: list[Any] = []
        weakref.finalize(self, _remove, self._watches).atexit = False  # hooks go with the engine, not with the model
        self._used: set[FSDPParam] | None = None  # in this window on this rank; None where it need not be known
        super().__init__(_one_dimension(self._groups), [param.sharded_param for param in self._params])

    @property
    def group(self) -> dist.ProcessGroup:
        # Made when it is asked for: `no_sync` needs none, and need not be collective.
        if self._mesh_group is None:
            self._mesh_group = _whole_group(self._groups) or self._group
        return self._mesh_group

    @property
    def twins(self) -> Sequence[dist.ProcessGroup]:  # type: ignore[override]
        return _beside(self._groups)

    @property
    def leaves(self) -> Sequence[torch.Tensor]:
        self._make_unsharded(self._params)
        return [param._unsharded_param for param in self._params]

    @property
    def gathered(self) -> dict[torch.Tensor, nn.Parameter]:
        there = ((param._module_info, param) for g in self._groups if not g.is_sharded for param in g.fsdp_params)
        return {getattr(info.module, info.param_name): param.sharded_param for info, param in there}

    def num_held(self) -> int:
        return sum(group._partial_reduce_output is not None for group in self._groups) + sum(
            param.unsharded_accumulated_grad is not None
            or (hasattr(param, "_unsharded_param") and param._unsharded_param.grad is not None)
            for param in self._params
        )

    def held_gradients(self) -> dict[nn.Parameter, torch.Tensor]:
        """A gradient has one dimension more, of size 1, for each of the mesh's that it has been reduced over.

        So it can be told what is whole, what `hold_shards` has reduced to this rank's shard, and what needs no more. Of
        the second, what this rank has not used and has no part of is empty there: at the boundary `_drop_unused` asks.
        """
        held: dict[nn.Parameter, torch.Tensor] = {}
        for group in self._groups:
            partly = _pieces(group, group._partial_reduce_output)
            for param in group.fsdp_params:
                forms: list[torch.Tensor] = []
                whole = param.unsharded_accumulated_grad
                if whole is None and hasattr(param, "_unsharded_param"):
                    whole = param._unsharded_param.grad
                if whole is not None:
                    forms.append(whole)
                if param in partly:
                    piece = partly[param].unsqueeze(0)
                    forms.append(piece if param in (self._used or ()) or piece.any() else piece[:0])
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

    def load_held(self, gradients: Mapping[nn.Parameter, torch.Tensor]) -> None:
        for param in self._params:
            _check_piece(param, gradients.get(param.sharded_param))
        self._make_unsharded(self._params)
        partly: dict[FSDPParamGroup, dict[FSDPParam, torch.Tensor]] = {}
        for group in self._groups:
            group._partial_reduce_output = None
            for param in group.fsdp_params:
                sharded = param.sharded_param
                param.unsharded_accumulated_grad = sharded.grad = None
                gradient = gradients.get(sharded)
                if gradient is None:
                    continue
                num_reduced = gradient.dim() - sharded.dim()
                if num_reduced == 0:
                    param.unsharded_accumulated_grad = gradient.to(param.device)
                elif num_reduced == param.mesh_info.mesh.ndim:
                    sharded.grad = param.to_sharded_dtensor(gradient[(0,) * num_reduced])
                else:
                    partly.setdefault(group, {})[param] = gradient.to(param.device)
        if self._used is not None or partly:
            self._watch_use().update(
                param for pieces in partly.values() for param, piece in pieces.items() if len(piece)
            )
        for group, pieces in partly.items():
            size = sum(map(_numel_of_piece, _reduced_together(group)))
            group._partial_reduce_output = next(iter(pieces.values())).new_zeros(size)
            for param, place in _pieces(group, group._partial_reduce_output).items():
                place.copy_(pieces[param].sum(0))  # of none or of one

    def rest(self) -> None:
        self._recover()
        for group in self._groups:
            if not group.is_sharded and group._training_state is TrainingState.IDLE:
                group._to_sharded()

    def trainable(self) -> bool:
        if self._used is not None:
            self._watch_use()
        return super().trainable()

    def open(self, source: int) -> None:  # noqa: ARG002 - FSDP leaves buffers to their rank
        if self._complete:
            return
        self._complete = True
        if any(group.gradient_divide_factor is not None for group in self._groups):
            raise GradSyncError(
                "gradsync needs the engine to average gradients over the ranks, but this model's "
                "set_gradient_divide_factor was called, which makes that something else. Leave it out: a LossSum gives "
                "a mean over tokens."
            )
        # torch 2.13 fails as a held backward ends, if reduce_dtype is set and a module has never run until then.
        self._make_unsharded(p for g in self._groups if g.mp_policy.reduce_dtype is not None for p in g.fsdp_params)

    # -- micro-batch ----------------------------------------------------------------------------------------------

    def hold(self) -> tuple[list[bool], int]:
        groups = self._groups
        found = [group.reduce_grads for group in groups]
        for group in groups:
            group.reduce_grads = False
        return found, len(self._undo)

    def hold_shards(self) -> tuple[list[bool], int]:
        found = self.hold()
        if self._used is None:
            self._watch_use()
        # What is reduced in part keeps the layout of its first micro-batch, so that each must have all parameters, with
        # zeros for those that it did not use.
        self._switch(
            (group for group in self._groups if isinstance(group.mesh_info, FSDPMeshInfo)),
            reduce_grads=True, all_reduce_grads=False, reduce_scatter_unused_params=True,
        )  # fmt: skip
        return found

    def restore(self, found: tuple[list[bool], int]) -> None:
        flags, depth = found
        while len(self._undo) > depth:
            _put_back(self._undo.pop())
        for group, flag in zip(self._groups, flags, strict=True):
            group.reduce_grads = flag

    # -- boundary -------------------------------------------------------------------------------------------------

    def arm(self, loss: torch.Tensor | None) -> None:  # noqa: ARG002 - whatever reaches a group reduces it
        # A user who switched reshard_after_backward off keeps the parameters gathered between the micro-batches of a
        # window. Beyond the boundary they would be those from before the update.
        self._switch(self._groups, reduce_grads=True, all_reduce_grads=True, reshard_after_backward=True)
        partly = [group for group in self._groups if group._partial_reduce_output is not None]
        self._switch(partly, reduce_scatter_unused_params=True)  # without a gradient it would not all-reduce the rest

    def settle(self) -> None:
        if self.num_held():  # modules that only earlier micro-batches used, below another root than this backward's
            self._finish()
        self._drop_unused()

    def abort(self) -> None:
        """The other ranks wait in a gather of this rank's parameters, and cannot be helped from here."""

    def reduce(self) -> None:
        depth = len(self._undo)
        self.arm(None)
        self._make_unsharded(self._params)
        try:
            self._finish()
        finally:
            while len(self._undo) > depth:
                _put_back(self._undo.pop())
        self._drop_unused()

    def discard(self) -> None:
        if self._used is not None:
            self._used.clear()
        for param in self._params:
            param.unsharded_accumulated_grad = None
            param.sharded_param.grad = None
            if hasattr(param, "_unsharded_param"):
                param._unsharded_param.grad = None
        for group in self._groups:
            group._partial_reduce_output = None
        self.rest()

    # -- inside ---------------------------------------------------------------------------------------------------

    def _recover(self) -> None:
        """If an exception has left FSDP in the middle of a forward or backward, bring it out of there."""
        context = self._states[0]._state_ctx
        if (
            context.iter_forward_root is None
            and not context.post_backward_final_callback_queued
            and all(state._training_state is TrainingState.IDLE for state in self._states)
        ):
            return
        partly = [(g, g._partial_reduce_output) for state in context.all_states for g in state._fsdp_param_groups]
        next((state for state in context.all_states if state._is_root), self._states[0])._reset_iter_state()
        for group, output in partly:
            group._partial_reduce_output = output

    def _finish(self) -> None:
        """What ends each backward: the groups that hold something reduce it, and all is put away."""
        state = self._states[0]
        state._lazy_init()
        mine = set(self._groups)
        others = [g for one in state._state_ctx.all_states for g in one._fsdp_param_groups if g not in mine]
        self._switch(others, reduce_grads=False)
        try:
            state._root_post_backward_final_callback()
        finally:
            _put_back(self._undo.pop())

    def _watch_use(self) -> set[FSDPParam]:
        """Note which parameters a backward uses, those too that have become trainable, beside what is loaded."""
        self._used = used = {
            param
            for param in self._params
            if param.unsharded_accumulated_grad is not None or param.sharded_param.grad is not None
        }
        _remove(self._watches)
        for leaf, param in zip(self.leaves, self._params, strict=True):
            leaf.requires_grad_(param.sharded_param.requires_grad)
            if leaf.requires_grad:
                self._watches.append(leaf.register_post_accumulate_grad_hook(partial(_note, used, param)))
        return used

    def _drop_unused(self) -> None:
        """No gradient where no rank used the parameter, instead of those zeros; the ranks have to ask each other."""
        if self._used is None:
            return
        used = torch.tensor([param in self._used for param in self._params], dtype=torch.uint8)
        used = used.to(self._groups[0].device)
        dist.all_reduce(used, op=dist.ReduceOp.MAX, group=self.group)
        for param, anywhere in zip(self._params, used.tolist(), strict=True):
            if not anywhere:
                param.sharded_param.grad = None

    def _make_unsharded(self, params: Iterable[FSDPParam]) -> None:
        """What a first gather would make, without its data."""
        for param in params:
            if hasattr(param, "_unsharded_param") or hasattr(param._sharded_local_tensor, "fsdp_pre_all_gather"):
                continue
            dtype = param.mp_policy.param_dtype
            if dtype is None or not param.sharded_param.is_floating_point():
                dtype = param.sharded_param.dtype
            info = param.mesh_info
            num_shards = info.shard_mesh_size if isinstance(info, FSDPMeshInfo) else 1
            numel = param._sharded_param_data.numel()
            param.init_all_gather_outputs([numel], [dtype], num_shards, param.device)
            param.init_unsharded_param()
            param.free_unsharded_param()

    def _switch(self, groups: Iterable[FSDPParamGroup], **flags: bool) -> None:
        undo: _Undo = []
        for group in groups:
            undo.append((group, {name: getattr(group, name) for name in flags}))
            group.__dict__.update(flags)
        self._undo.append(undo)


def _remove(hooks: list[Any]) -> None:
    while hooks:
        hooks.pop().remove()


def _note(used: set[FSDPParam], param: FSDPParam, _: torch.Tensor) -> None:
    used.add(param)


def _reduced_together(group: FSDPParamGroup) -> list[FSDPParam]:
    """Those that `hold_shards` reduces in each micro-batch, used or not, in the order of the partial output."""
    return [p for p in group.fsdp_params if hasattr(p, "_unsharded_param") and p._unsharded_param.requires_grad]


def _numel_of_piece(param: FSDPParam) -> int:
    """With its padding."""
    return param._sharded_param_data.numel()


def _pieces(group: FSDPParamGroup, output: torch.Tensor | None) -> dict[FSDPParam, torch.Tensor]:
    """Views of a group's partial output: what it has of each parameter's shard, in the shard's shape."""
    if output is None:
        return {}
    params = _reduced_together(group)
    pieces = output.split([_numel_of_piece(param) for param in params])
    shapes = [param._sharded_local_tensor.shape for param in params]
    return {param: p[: shape.numel()].view(shape) for param, p, shape in zip(params, pieces, shapes, strict=True)}


def _check_piece(param: FSDPParam, gradient: torch.Tensor | None) -> None:
    """Raise if what is to be held is a piece of a gradient, and of another shard than this rank's."""
    num_reduced = 0 if gradient is None else gradient.dim() - param.sharded_param.dim()
    mine = param._sharded_local_tensor.shape
    if (
        gradient is not None
        and num_reduced
        and (num_reduced > param.mesh_info.mesh.ndim or gradient.shape[num_reduced:] != mine)
    ):
        raise GradSyncError(
            'A state in the middle of a window, under sync="shard" or "each", can be loaded on the mesh that it was '
            f"saved on, but it has a piece of a gradient of shape {list(gradient.shape[num_reduced:])} where this "
            f"rank's shard is of shape {list(mine)}. Use the same mesh, and each rank's own state."
        )


def _put_back(undo: _Undo) -> None:
    for group, flags in undo:
        group.__dict__.update(flags)


def _one_dimension(groups: Sequence[FSDPParamGroup]) -> dist.ProcessGroup:
    """The ranks along one of the mesh's dimensions."""
    if not groups:  # a module without parameters
        assert dist.group.WORLD is not None, "fully_shard needs it"
        return dist.group.WORLD
    info = groups[0].mesh_info
    if isinstance(info, FSDPMeshInfo):
        return info.shard_process_group
    assert isinstance(info, DDPMeshInfo), "sharded or replicated"
    return info.replicate_process_group


def _whole_group(groups: Sequence[FSDPParamGroup]) -> dist.ProcessGroup | None:
    """The group of both of HSDP's dimensions; None where there is one only."""
    info = groups[0].mesh_info if groups else None
    if not (isinstance(info, FSDPMeshInfo) and isinstance(info, DDPMeshInfo)):
        return None
    ranks = sorted(info.mesh.mesh.flatten().tolist())
    if ranks == list(range(dist.get_world_size())):
        return dist.group.WORLD
    made = dist.new_group(ranks, use_local_synchronization=True)
    assert isinstance(made, dist.ProcessGroup), "this rank is one of them"
    return made


def _beside(groups: Sequence[FSDPParamGroup]) -> list[dist.ProcessGroup]:
    """The groups of the dimensions that parameters have beside the data-parallel ones."""
    found: dict[dist.ProcessGroup, None] = {}
    for group in groups:
        mine = set(group.mesh_info.mesh.mesh_dim_names or ())
        for param in group.fsdp_params:
            sharded: Any = param.sharded_param  # a DTensor
            mesh = sharded.device_mesh
            for dimension, name in enumerate(mesh.mesh_dim_names or ()):
                if name not in mine:
                    found[mesh.get_group(dimension)] = None
    return list(found)
