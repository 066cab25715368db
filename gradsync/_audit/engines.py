"""What each engine can be asked: whether it has synchronised since the last time, and what is not synchronised now.

All that this needs of torch's privates is in this file, and, where versions of torch differ, in
`gradsync/engines/_torch.py`; `tests/audit/test_audit.py` fails when it changes:

- DDP's reducer: `get_backward_stats()` gives the time at which each parameter was last marked ready, in nanoseconds.
  Only a synchronising backward marks them, whoever armed it and whatever communication hook runs; a broadcast, a bucket
  rebuild, an all-reduced loss or SyncBatchNorm does not. Two synchronisations look like one only if every parameter's
  time since the forward is the same to the nanosecond. `_check_reducer_finalized()` raises while a reduction is
  under way, for instance between the two backwards of a loss in two parts. A static graph's very first synchronisation
  leaves no times, but replaces the map of used parameters, `_get_local_used_map()`. Reductions that gradsync makes
  bucket by bucket do not run the reducer's hooks: gradsync counts them in an attribute of the DDP.
- FSDP2: a sharded parameter's post-accumulate-grad hooks run when it is reduced, and only then. A backward, held or
  not, calls each state's `_pre_backward` first. Held gradients are at `_unsharded_param`, `unsharded_accumulated_grad`
  and `_partial_reduce_output`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from gradsync.engines._torch import groups_of, whole_gradient

# Attributes of a DDP that the rest of gradsync writes, which imports nothing of the audit.
BY_HAND = "_gradsync_reductions"
NUM_TRAVELLING = "_gradsync_travelling"  # windows whose gradients travel, beside the held ones of the next


class WatchedEngine:
    """One engine under watch. `parameters` are those that it synchronises."""

    kind = "none"

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.parameters: Sequence[nn.Parameter] = ()
        self.ids: frozenset[int] = frozenset()
        self.version = 0
        self.assign(parameters)
        # Whether ranks differ if they do not synchronise: not if there is one rank.
        self.matters = True
        # Parameters that a backward reached since the engine last synchronised.
        self.local: set[int] = set()

    def assign(self, parameters: Sequence[nn.Parameter]) -> None:
        """Take these as the engine's parameters."""
        self.parameters, self.ids = parameters, frozenset(map(id, parameters))
        self.version += 1

    def poll(self) -> int | None:
        """Return the bytes that were synchronised since the last poll, None if there was no synchronisation."""
        return None

    @property
    def first_is_due(self) -> bool:
        """Whether torch demands the synchronisation that `poll` has just reported."""
        return False

    def switched_off(self) -> bool:
        """Whether the loop has told the engine to hold gradients back."""
        return False

    @property
    def travels(self) -> bool:
        """Whether gradients still travel, for a step that is to come (gradsync's `overlap`)."""
        return False

    def unsynchronised(self, stepped: frozenset[int]) -> bool:
        """Whether any parameter with one of these ids has a gradient that is not synchronised."""
        return (
            self.matters
            and bool(self.local)
            and any(id(p) in self.local and id(p) in stepped and p.grad is not None for p in self.parameters)
        )

    def has_gradients(self, beside: nn.Parameter | None = None) -> bool:
        """Whether there are gradients, other than zeros, at parameters other than `beside`."""
        others = [p for p in self.parameters if p is not beside]
        return not others or any(p.grad is not None and bool(_local(p.grad).any()) for p in others)


class NoEngine(WatchedEngine):
    """The parameters that no engine holds. With several ranks, nothing synchronises their gradients."""

    def __init__(self) -> None:
        super().__init__(())
        self.matters = rank_and_ranks()[1] > 1

    def assign(self, parameters: Sequence[nn.Parameter]) -> None:
        # Not DTensors: their placements say what a gradient is on each rank, for instance in tensor parallelism.
        super().assign([p for p in parameters if not _is_dtensor(p)])


class WatchedDDP(WatchedEngine):
    """A `DistributedDataParallel`; also one that gradsync put behind a module, and the one inside `replicate`."""

    kind = "ddp"

    def __init__(self, ddp: DistributedDataParallel, behind: nn.Module | None = None) -> None:
        super().__init__(())
        self.ddp, self.behind = ddp, behind
        self._used = torch.empty(0, device="cpu")
        self._first = False
        self._by_hand = ddp.__dict__.get(BY_HAND, 0)
        self._read_reducer()
        self._times = self._reducer.get_backward_stats()

    def follow(self, ddp: DistributedDataParallel) -> None:
        """Watch `ddp` from now on: gradsync makes another DDP for the module when parameters are unfrozen."""
        if ddp is not self.ddp:
            self.ddp = ddp
            self._read_reducer()

    def poll(self) -> int | None:
        if self.ddp.reducer is not self._reducer:
            self._read_reducer()
        times = self._reducer.get_backward_stats()
        self._first = False
        by_hand = self.ddp.__dict__.get(BY_HAND, 0)
        if by_hand != self._by_hand:
            self._by_hand = by_hand
            return self._num_bytes
        if times == self._times:
            if not self.ddp.static_graph or any(times):
                return None
            used = self._reducer._get_local_used_map()
            if torch.equal(used, self._used):
                return None
            self._used, self._first = used.clone(), True
        try:
            self._reducer._check_reducer_finalized()
        except RuntimeError:
            return None
        self._times = times
        return self._num_bytes

    @property
    def first_is_due(self) -> bool:
        # A static graph that is held in its very first backward never synchronises again (pytorch#143580).
        return self._first

    def switched_off(self) -> bool:
        return not self.ddp.require_backward_grad_sync

    @property
    def travels(self) -> bool:
        return bool(self.ddp.__dict__.get(NUM_TRAVELLING, 0))

    def unsynchronised(self, stepped: frozenset[int]) -> bool:
        # The step uses gradients that have landed; held gradients are put aside meanwhile.
        return not self.travels and super().unsynchronised(stepped)

    def _read_reducer(self) -> None:
        self._reducer: Any = self.ddp.reducer
        self._times = [0] * len(self._reducer.get_backward_stats())
        if self.ddp.static_graph:
            self._used = self._reducer._get_local_used_map().clone()
        self.matters = dist.get_world_size(self.ddp.process_group) > 1
        reduced = [p for p in self.ddp._module_parameters if p.requires_grad]
        if len(reduced) != len(self._times):
            # Parameters were frozen or unfrozen: the reducer still has those that were trainable when it was made.
            buckets = self._reducer._get_zeros_like_grad_buckets()
            reduced = [p for bucket in buckets for p in bucket.parameters()]
        if self.behind is not None:
            # gradsync's own DDP has a parameter beside the module's.
            own = set(map(id, self.behind.parameters()))
            reduced = [p for p in reduced if id(p) in own]
        self.assign(reduced)
        self._num_bytes: int = sum(p.numel() * p.element_size() for p in reduced)


class WatchedFSDP2(WatchedEngine):
    """All `fully_shard`ed modules of one model, also with HSDP and `replicate_with_fsdp`."""

    kind = "fsdp2"

    def __init__(self, states: Sequence[Any]) -> None:
        self._states = states
        self._groups = [group for state in states for group in groups_of(state)]
        members = [member for group in self._groups for member in group.fsdp_params]
        super().__init__([member.sharded_param for member in members])
        # Between forward and backward, a module may have these in place of its sharded parameters.
        self.unsharded = {id(p) for member in members if (p := getattr(member, "_unsharded_param", None)) is not None}
        self._sizes = {id(member.sharded_param): _bytes_reduced(member) for member in members}
        self._bytes: int | None = None
        self._unwatched = list(self.parameters)
        self._undo: list[Callable[[], None]] = []

    def hook(self, reached: Callable[[WatchedEngine], None]) -> None:
        """Have `reached` called when a backward reaches the engine."""
        self._reached = reached
        self.hook_trainable()
        self._undo.extend(_wrap_pre_backward(state, lambda: reached(self)) for state in self._states)

    def hook_trainable(self) -> None:
        """Watch the parameters that are trainable now."""
        if self._unwatched:
            new = [p for p in self._unwatched if p.requires_grad]
            self._unwatched = [p for p in self._unwatched if not p.requires_grad]
            self._undo.extend(hook_gradient(p, self._on_reduced).remove for p in new)

    def unhook(self) -> None:
        """Remove all hooks."""
        for undo in self._undo:
            undo()

    def poll(self) -> int | None:
        reduced, self._bytes = self._bytes, None
        return reduced

    def switched_off(self) -> bool:
        return not any(group.reduce_grads and group.all_reduce_grads for group in self._groups)

    def unsynchronised(self, stepped: frozenset[int]) -> bool:
        # A step leaves held gradients out: they are not at the parameters that it sees.
        return any(
            any(id(member.sharded_param) in stepped for member in group.fsdp_params) and _holds(group)
            for group in self._groups
        )

    def _on_reduced(self, parameter: torch.Tensor) -> None:
        self._reached(self)  # counts a backward whose forward ran before the audit began
        self._bytes = (self._bytes or 0) + self._sizes[id(parameter)]


def hook_gradient(parameter: nn.Parameter, hook: Callable[[torch.Tensor], None]) -> RemovableHandle:
    """Have `hook` called with the parameter whenever its gradient has been accumulated."""
    handle: RemovableHandle = parameter.register_post_accumulate_grad_hook(hook)
    return handle


def rank_and_ranks() -> tuple[int, int]:
    """Return this rank and how many there are: 0 and 1 without a process group."""
    if not (dist.is_available() and dist.is_initialized()):
        return 0, 1
    return dist.get_rank(), dist.get_world_size()


def _is_dtensor(tensor: torch.Tensor) -> bool:
    return hasattr(tensor, "_local_tensor")


def _local(gradient: torch.Tensor) -> torch.Tensor:
    # A DTensor's own `any()` would communicate, on this rank only.
    shard: torch.Tensor = getattr(gradient, "_local_tensor", gradient)
    return shard.coalesce().values() if shard.is_sparse else shard


def _bytes_reduced(member: Any) -> int:
    policy, parameter = member.mp_policy, member.sharded_param
    dtype: torch.dtype = policy.reduce_dtype or policy.param_dtype or parameter.dtype
    return int(parameter.numel()) * dtype.itemsize


def _holds(group: Any) -> bool:
    if group._partial_reduce_output is not None:
        return True
    return any(whole_gradient(member) is not None for member in group.fsdp_params)


def _wrap_pre_backward(state: Any, reached: Callable[[], None]) -> Callable[[], None]:
    """Have `reached` called when a backward reaches this state; return the function that undoes this."""
    before = state.__dict__.get("_pre_backward")
    original = state._pre_backward

    def pre_backward(grad: torch.Tensor) -> torch.Tensor:
        reached()
        result: torch.Tensor = original(grad)
        return result

    state._pre_backward = pre_backward

    def restore() -> None:
        if state.__dict__.get("_pre_backward") is not pre_backward:
            return  # a later audit's wrapper calls this one, which stays and has no effect
        if before is None:
            del state._pre_backward
        else:
            state._pre_backward = before

    return restore
