"""Which parameters of `fully_shard` each rank has used in a window, and what becomes of those that no rank has used.

The ranks reduce all parameters of a group together, with zeros for those that a rank has not used: so they have to ask
each other whether anybody has.
"""

from __future__ import annotations

import weakref
from functools import partial
from operator import gt
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from gradsync.engines import _torch
from gradsync.engines._fsdp2_refused import refuse_use_elsewhere
from gradsync.engines._to_device import flags_on

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

    from gradsync.engines._protocol import Engine


class Use:
    """The parameters that this rank has used in the current window. Hooks note them, once `begin` was called."""

    def __init__(self, engine: Engine, groups: Sequence[FSDPParamGroup]) -> None:
        self._engine = weakref.ref(engine)
        # Before torch 2.13, all ranks must have a gradient for the same parameters: also one of a replay, all zeros.
        self._needs_replays = not _torch.can_reduce_unused(groups)
        self._params: weakref.WeakSet[FSDPParam] = weakref.WeakSet()
        self._hooks: list[Any] = []
        self._hooked: list[weakref.ref[torch.Tensor]] = []  # the tensors that have them
        self.is_noted = False
        weakref.finalize(self, _remove, self._hooks).atexit = False  # hooks go with the engine, not with the model

    def __contains__(self, param: FSDPParam) -> bool:
        return param in self._params

    def begin(self, params: Sequence[FSDPParam], leaves: Sequence[torch.Tensor]) -> None:
        """Note the use of parameters from now on. Those that have a gradient already count as used."""
        self.is_noted = True
        self._params.clear()
        self.add(p for p in params if _torch.whole_gradient(p) is not None or p.sharded_param.grad is not None)
        trained = [(leaf, param) for leaf, param in zip(leaves, params, strict=True) if leaf.requires_grad]
        if [id(ref()) for ref in self._hooked] == [id(leaf) for leaf, _ in trained]:
            return
        self._hooked = [weakref.ref(leaf) for leaf, _ in trained]
        _remove(self._hooks)
        for leaf, param in trained:
            note = partial(_note, self._engine, weakref.ref(self), weakref.ref(param))
            self._hooks.append(leaf.register_post_accumulate_grad_hook(note))

    def add(self, params: Iterator[FSDPParam]) -> None:
        """Count these parameters as used."""
        self._params.update(params)

    def clear(self) -> None:
        """The window is discarded."""
        self._params.clear()

    def drop_unused(self, groups: Sequence[FSDPParamGroup], ranks: dist.ProcessGroup) -> None:
        """Drop the zeros that parameters have as gradients if none of the ranks has used them. Collective.

        A rank that has used all of them knows the answer, and does not wait for it.
        """
        params, device = [param for group in groups for param in group.fsdp_params], groups[0].device
        own = [param in self._params for param in params]
        used = (
            torch.ones(len(own), dtype=torch.uint8, device=device) if all(own) else flags_on(device, own, torch.uint8)
        )
        dist.all_reduce(used, op=dist.ReduceOp.MAX, group=ranks)
        if all(own):
            return
        anywhere = used.tolist()
        if not _torch.can_reduce_unused(groups):
            refuse_use_elsewhere(sum(map(gt, anywhere, own)))
        for param, is_used in zip(params, anywhere, strict=True):
            if not is_used:
                param.sharded_param.grad = None


def _remove(hooks: list[Any]) -> None:
    while hooks:
        hooks.pop().remove()


def _note(engine: weakref.ref[Engine], use: weakref.ref[Use], param: weakref.ref[FSDPParam], _: torch.Tensor) -> None:
    watched, noted, used = engine(), use(), param()
    if watched is None or noted is None or used is None:
        return
    if noted._needs_replays or not watched.replays:
        noted._params.add(used)
