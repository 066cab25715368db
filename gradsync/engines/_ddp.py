"""`DistributedDataParallel`, its reducer armed late.

DDP arms its reducer at the end of its own forward, and so needs to know there which micro-batch is the last, and needs
the forward to be its own. Here every forward runs held, and the reducer is armed right before the backward of the
boundary. Whatever the body called, a method, a sub-module, `ddp.module(x)`, the backward then reaches the parameters,
and their hooks reach the reducer.

All that is private in torch and needed for this is in this file (read in torch 2.13; `tests/test_torch_internals.py`
fails when it changes): `ddp.reducer` with `prepare_for_forward`, `prepare_for_backward`, `_rebuild_buckets`,
`get_backward_stats`, `_check_reducer_finalized`, `_delay_all_reduce`, `_get_local_used_map`,
`_get_zeros_like_grad_buckets`, `_push_all_rebuilt_params`, `_reset_state`, `_run_comm_hook`; and the attributes of
DDP that are named below.
"""

from __future__ import annotations

import re
import time
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import Variable
from torch.nn.parallel import DistributedDataParallel

from gradsync._errors import GradSyncError
from gradsync.engines._protocol import Engine

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from gradsync.engines._protocol import Table

# Seconds for reductions that nobody can wait for any more: torch keeps their futures to itself, and a late one would
# write into the buckets of the next. All ranks have begun them, and a worker needs the GIL, which sleeping gives up.
_LOST_REDUCTION = 0.2

_FEW = 16  # parameters, whose times in a backward may all be those of the one before


class _Touch(torch.autograd.Function):
    """Runs the gradient hooks of parameters without a gradient.

    The reducer's hooks fire, find the gradient that is already there, or none, and hand it on: a synchronisation
    without a forward. An undefined gradient adds nothing, so it is exact, and a parameter that nobody used stays None
    where DDP looks for unused parameters.
    """

    @staticmethod
    def forward(ctx: Any, *parameters: torch.Tensor) -> torch.Tensor:
        ctx.num_parameters = len(parameters)
        return parameters[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> tuple[None, ...]:
        return (None,) * ctx.num_parameters


class DDPEngine(Engine):
    """One `DistributedDataParallel`, whoever made it."""

    def __init__(self, ddp: DistributedDataParallel, module: nn.Module | None = None) -> None:
        if ddp._delay_all_reduce_params:
            raise GradSyncError(
                "gradsync needs to hold a model's gradients back, but this DistributedDataParallel was made with "
                "delay_all_reduce_named_params, which synchronises those parameters in every backward. "
                "Leave that argument out."
            )
        assert ddp.process_group is not None, "every DistributedDataParallel has one"
        super().__init__(ddp.process_group, ddp._module_parameters)
        self._ddp = ddp
        self._sparse = _sparse_parameters(module or ddp.module)
        self._reduced = _reduced_parameters(ddp)
        self._stats_before: list[int] = []
        self._gradients_before: list[tuple[nn.Parameter, torch.Tensor | None, int]] = []
        self._shortcut = None if module is not None else _shortcut(ddp)
        self._lonely = self.group.size() == 1 and not self._searched and "comm_hook" not in ddp._get_ddp_logging_data()
        self._owes_first = ddp.static_graph and not ddp._static_graph_delay_allreduce_enqueued
        if len(self._reduced) != ddp._get_ddp_logging_data()["num_parameter_tensors"]:
            self._rebuild_reducer()

    # -- window ---------------------------------------------------------------------------------------------------

    def trainable(self) -> bool:
        now = _reduced_parameters(self._ddp)
        if not same(now, self._reduced):
            self._reduced = now
            if now:
                self._rebuild_reducer()
        return bool(now)

    def open(self, source: int) -> None:
        ddp = self._ddp
        if ddp.forward_sync_buffers and ddp.modules_buffers and dist.get_world_size(self.group) > 1:
            with torch.no_grad():
                ddp._assign_modules_buffers()
                with torch.autograd._unsafe_preserve_version_counter(tuple(ddp.modules_buffers)):
                    ddp._sync_module_buffers(source)

    # -- micro-batch ----------------------------------------------------------------------------------------------

    @property
    def owes_first(self) -> bool:
        return self._owes_first

    def hold(self) -> tuple[bool, bool, Any]:
        # Written through vars(): nn.Module.__setattr__ costs 1.7 us a pair, this 0.05.
        state = vars(self._ddp)
        found = (state["require_backward_grad_sync"], state["require_forward_param_sync"], state.get("forward"))
        state["require_backward_grad_sync"] = state["require_forward_param_sync"] = False
        state["_gradsync_held"] = True
        if self._shortcut is not None and not self.is_compiled and not state["_join_config"].enable:
            state["forward"] = self._shortcut
        if self._owes_first:
            state["_static_graph_delay_allreduce_enqueued"] = True  # else DDP's forward would queue it once more
        return found

    def restore(self, found: tuple[bool, bool, Any]) -> None:
        state = vars(self._ddp)
        self._note_used()
        state["require_backward_grad_sync"], state["require_forward_param_sync"], forward = found
        if forward is not None:
            state["forward"] = forward
        elif self._shortcut is not None:
            state.pop("forward", None)
        if self._owes_first:
            state["_static_graph_delay_allreduce_enqueued"] = False

    # -- boundary -------------------------------------------------------------------------------------------------

    def arm(self, loss: torch.Tensor | None) -> None:
        ddp = self._ddp
        if self._is_alone:
            return
        self._define_stale()
        vars(ddp)["require_backward_grad_sync"] = True  # compiled DDP's python_reducer reads it in backward
        ddp.reducer.prepare_for_forward()
        ddp.reducer.prepare_for_backward(self._outputs(loss))
        self._stats_before = ddp.reducer.get_backward_stats()
        watched = self._reduced if self._searched or len(self._reduced) <= _FEW else ()
        self._gradients_before = [(parameter, parameter.grad, _version(parameter.grad)) for parameter in watched]
        if self._owes_first:
            # A static graph reduces at the end of its first backward. DDP's forward would arrange that.
            ddp._static_graph_delay_allreduce_enqueued, self._owes_first = True, False
            self._stats_before = []
            if loss is None:
                self._queue_delayed_reduction()
            else:
                loss.register_hook(lambda _: self._queue_delayed_reduction())

    def settle(self, table: Table = ()) -> Table | None:
        if self._ddp._use_python_reducer:
            return None
        if self._is_alone:
            self._insist_on_use([parameter for parameter in self._reduced if parameter.grad is None])
            return None
        if self._is_untouched():
            return self.reduce(table)
        missing = self._unready()
        never_used = [] if self._searched else [parameter for parameter in missing if parameter.grad is None]
        self._complete(missing)
        self._insist_on_use(never_used)
        return None

    def abort(self, table: Table = ()) -> Table | None:
        if self._is_alone:
            return None
        if self._ddp.static_graph and not self._stats_before:
            self._reducer._delay_all_reduce()  # its first reduction, which was queued for the end of the backward
            return None
        if self._is_untouched():
            return self.reduce(table)
        try:
            missing = self._unready()
        except RuntimeError:
            self._forget_reduction()
            return None
        self._complete(missing)
        return None

    def reduce(self, table: Table = ()) -> Table | None:  # noqa: ARG002 - for those that carry
        if self._is_alone:
            return None
        if self._ddp.static_graph:
            self._reduce_static()
            return None
        self._define_stale()
        reducer, nothing = self._ddp.reducer, self._touch(self._reduced)
        reducer.prepare_for_forward()
        reducer.prepare_for_backward(self._outputs(nothing))
        nothing.backward()
        self._rebuild_buckets()
        return None

    def discard(self) -> None:
        self._note_used()
        super().discard()

    # -- the reducer ----------------------------------------------------------------------------------------------

    @property
    def _is_alone(self) -> bool:
        """Whether there is no other rank to synchronise with, and no communication hook that wants to see gradients.

        Nothing is sent then. DDP itself would have its backend add one rank up.
        """
        return self._lonely and not self._ddp._comm_hooks

    def _insist_on_use(self, never_used: Sequence[nn.Parameter]) -> None:
        """Raise for parameters that no micro-batch of a window used, where DDP does not look for those."""
        if never_used:
            raise GradSyncError(_unused_message(self.named_parameters(), never_used))

    def _is_untouched(self) -> bool:
        """Whether the armed backward reached none of these parameters.

        The reducer has noted, by parameter, how long after its arming the backward came there. Two backwards of a small
        model can take the same time to the nanosecond, one in some ten thousand of them does, and so gradients that
        have changed overrule it. Where all of many parameters are reached, not all of their times can be the same.
        """
        if self._ddp.reducer.get_backward_stats() != self._stats_before:
            return False
        return all(p.grad is grad and _version(grad) == version for p, grad, version in self._gradients_before)

    @property
    def _searched(self) -> bool:
        """Whether parameters may go unused: DDP looks for those."""
        return self._ddp.find_unused_parameters or self._ddp.static_graph

    def _note_used(self) -> None:
        """Take note of what held backwards have used so far, where somebody may drop it."""
        state = vars(self._ddp)
        if self._ddp.find_unused_parameters and state.get("_gradsync_held"):
            state.setdefault("_gradsync_used", set()).update(id(p) for p in self._reduced if p.grad is not None)

    def _define_stale(self) -> None:
        """Zeros for the parameters whose gradients somebody has dropped since held backwards made them.

        A reducer that looks for unused parameters remembers which ones backwards have used, until it next reduces, and
        then takes no undefined gradient for these. It does not tell which.
        """
        used = vars(self._ddp).pop("_gradsync_used", ())
        for parameter in self._reduced if used else ():
            if parameter.grad is None and id(parameter) in used:
                parameter.grad = torch.zeros_like(parameter)

    @property
    def _reducer(self) -> Any:
        return self._ddp.reducer  # torch's stubs know half of it

    def named_parameters(self) -> Iterable[tuple[str, nn.Parameter]]:
        """The parameters by the names that their user knows."""
        return self._ddp.module.named_parameters()

    def _outputs(self, loss: torch.Tensor | None) -> list[torch.Tensor]:
        """What DDP should search for unused parameters, where it is to search at all."""
        if not self._ddp.find_unused_parameters or self._ddp.static_graph:
            return []
        # Without a loss to search, none is marked in advance; `settle` completes what the backward does not reach.
        return [self._touch(self._reduced) if loss is None else loss]

    def _touch(self, parameters: Sequence[nn.Parameter]) -> torch.Tensor:
        """A scalar whose backward runs the gradient hooks of `parameters`, and adds nothing to any gradient."""
        for parameter in parameters:
            if parameter.grad is None and id(parameter) in self._sparse:
                # The reducer takes no undefined gradient for a sparse one; nothing at all, it does.
                no_rows = torch.zeros((1, 0), dtype=torch.int64, device=parameter.device)
                parameter.grad = torch.sparse_coo_tensor(no_rows, parameter.detach()[:0], parameter.shape)
        with torch.enable_grad():
            return _Touch.apply(*parameters)  # type: ignore[no-untyped-call]

    def _unready(self) -> list[nn.Parameter]:
        """The parameters whose hooks the armed backward did not run."""
        try:
            self._ddp.reducer._check_reducer_finalized()
        except RuntimeError as error:
            # The reducer tells which in its message only.
            found = re.search(r"did not receive grad for rank \d+: ([\d ]+)", str(error))
            if found is None:
                raise
            return [self._reduced[int(index)] for index in found[1].split()]
        return []

    def _complete(self, missing: Sequence[nn.Parameter]) -> None:
        """Make ready what a backward has left, and with it the whole reduction."""
        if missing:
            self._touch(missing).backward()
        self._rebuild_buckets()

    def _queue_delayed_reduction(self) -> None:
        Variable._execution_engine.queue_callback(self._reducer._delay_all_reduce)

    def _reduce_static(self) -> None:
        """Reduce bucket by bucket: a static graph counts its hooks, so that they cannot be run once more by hand."""
        used = self._ddp.reducer._get_local_used_map().tolist()  # of the first synchronisation, and so of every one
        # A communication hook averages; without one the reducer divides before it sums.
        share = 1.0 if "comm_hook" in self._ddp._get_ddp_logging_data() else 1.0 / self.group.size()
        for bucket in self._ddp.reducer._get_zeros_like_grad_buckets():
            for parameter, view in zip(bucket.parameters(), bucket.gradients(), strict=True):
                if parameter.grad is not None:
                    torch.mul(parameter.grad, share, out=view)
            averaged = self._ddp.reducer._run_comm_hook(bucket).wait()
            bucket.set_buffer(averaged[0] if isinstance(averaged, list) else averaged)
            for parameter, view in zip(bucket.parameters(), bucket.gradients(), strict=True):
                if parameter.grad is None:
                    parameter.grad = view.clone()
                else:
                    parameter.grad.copy_(view)
        for parameter, count in zip(self._reduced, used, strict=True):
            if not count:
                parameter.grad = None
        vars(self._ddp)["_gradsync_reductions"] = vars(self._ddp).get("_gradsync_reductions", 0) + 1  # for audit
        # The ranks in a real backward rebuild their buckets after this one, if they have not yet.
        self._ddp.reducer._push_all_rebuilt_params()
        self._rebuild_buckets()

    def _rebuild_buckets(self) -> None:
        """Order the buckets after the first reduction, as DDP does in its next forward: other ranks may run none."""
        state = vars(self._ddp)
        state["_gradsync_held"] = False
        state.pop("_gradsync_used", None)
        if "_gradsync_keeps_buckets" in state:
            self._ddp.reducer._reset_state()
        elif self._ddp.reducer._rebuild_buckets():
            self._ddp._has_rebuilt_buckets = True

    def _forget_reduction(self) -> None:
        """A backward failed after the last gradient had left: what the reducer had queued for its end is lost.

        Its state can only be reset as a whole. It then wants to order its buckets anew, with all ranks, which have no
        reason to; so these are ordered now if that is due on all, and else kept as they are.
        """
        reducer = self._ddp.reducer
        time.sleep(_LOST_REDUCTION)
        reducer._reset_state()
        if self._ddp.find_unused_parameters and not self._ddp.static_graph:
            return  # such a reducer never orders its buckets
        if self._ddp._has_rebuilt_buckets:
            vars(self._ddp)["_gradsync_keeps_buckets"] = True
        else:
            reducer._push_all_rebuilt_params()
            self._rebuild_buckets()

    def _rebuild_reducer(self) -> None:
        """A reducer for the parameters that are trainable now, with the user's communication hooks."""
        ddp = self._ddp
        kind, _, name = ddp._get_ddp_logging_data().get("comm_hook", "").partition(".")
        builtin = name if kind == "BuiltinCommHookType" else None  # DDP itself keeps only those written in Python
        ddp.reducer._remove_autograd_hooks()
        vars(ddp).pop("_gradsync_keeps_buckets", None)
        ddp._has_rebuilt_buckets = False
        parameters, sparse = ddp._build_params_for_reducer()
        ddp._ddp_init_helper(parameters, sparse, ddp._build_debug_param_to_name_mapping(parameters), ddp.static_graph)
        if ddp.static_graph:
            ddp._static_graph_delay_allreduce_enqueued, self._owes_first = False, True
            ddp.reducer._set_static_graph()
        for hook, state in ddp._comm_hooks:
            dist._register_comm_hook(ddp.reducer, state, hook)
        if builtin is not None:
            ddp._register_builtin_comm_hook(getattr(dist.BuiltinCommHookType, builtin))


def same(some: Sequence[nn.Parameter], others: Sequence[nn.Parameter]) -> bool:
    """Whether these are the same objects; `==` would compare what is in them."""
    return len(some) == len(others) and all(a is b for a, b in zip(some, others, strict=True))


def _shortcut(ddp: DistributedDataParallel) -> Callable[..., Any] | None:
    """The forward of the module inside, where that of a DDP that is held would add nothing to it but its own cost.

    Which is more than half of a tiny model's. It may move or cast inputs, mark the outputs of a search or a static
    graph, and tell torch.compile where it is; these keep it.
    """
    works = ddp.device_ids or ddp.mixed_precision or ddp.find_unused_parameters or ddp.static_graph
    own = type(ddp).forward is not DistributedDataParallel.forward or "forward" in vars(ddp)
    compiled = any(hasattr(one, "_orig_mod") or one._compiled_call_impl is not None for one in ddp.modules())
    in_backward = any(hasattr(parameter, "_in_backward_optimizers") for parameter in ddp._module_parameters)
    if works or own or compiled or in_backward or ddp._use_python_reducer:
        return None
    return ddp.module.__call__


def _version(gradient: torch.Tensor | None) -> int:
    """How often it has been written to."""
    return -1 if gradient is None else gradient._version


def _reduced_parameters(ddp: DistributedDataParallel) -> list[nn.Parameter]:
    return [parameter for parameter in ddp._module_parameters if parameter.requires_grad]


def _sparse_parameters(module: nn.Module) -> frozenset[int]:
    embeddings = (one for one in module.modules() if isinstance(one, nn.Embedding | nn.EmbeddingBag) and one.sparse)
    return frozenset(id(one.weight) for one in embeddings)


def _unused_message(named: Iterable[tuple[str, nn.Parameter]], unused: Sequence[nn.Parameter]) -> str:
    names = [name for name, p in named if any(p is one for one in unused)]
    return (
        f"Every trainable parameter of a DistributedDataParallel model must be used in each window, but on this rank "
        f"no micro-batch of the window used {', '.join(names)}. Pass find_unused_parameters=True to "
        "DistributedDataParallel, or hand gradsync the bare model, which needs no such flag."
    )
