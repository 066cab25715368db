"""`DistributedDataParallel`, with its reducer armed right before the backward.

DDP arms its reducer at the end of its own forward. So it must know in the forward which micro-batch is the last, and
the forward must be DDP's. Here every forward runs held, and the reducer is armed right before the boundary's backward.
The body may call a method, a sub-module or `ddp.module(x)`: the backward reaches the parameters, and their hooks call
the reducer.

Private in torch (read in torch 2.13; `tests/engines/test_torch_ddp.py` fails when it changes): `ddp.reducer` with
`prepare_for_forward`, `prepare_for_backward`, `_rebuild_buckets`, `_check_reducer_finalized`,
`_get_zeros_like_grad_buckets`, `_push_all_rebuilt_params`, `_reset_state`; and `_pre_forward`, `_post_forward` and
attributes of DDP that are named below. Static graphs are in `_ddp_static.py`, DDPs that look for unused parameters in
`_ddp_searched.py`, and groups of one rank in `_ddp_alone.py`.
"""

from __future__ import annotations

import re
import time
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from gradsync._errors import GradSyncError
from gradsync._state import WIRES
from gradsync.engines._ddp_forward_shortcut import as_it_is, moved, shortcut
from gradsync.engines._ddp_unused import forget_unused, names_of, unused_message, used_anywhere
from gradsync.engines._ddp_usable import (
    check,
    insist_on_shapes,
    is_built_for,
    is_resized,
    is_wired,
    joined,
    nodes_of,
    note_wires,
    own_names,
    sparse_parameters,
)
from gradsync.engines._muted_parameter_hooks import silent
from gradsync.engines._protocol import Carrier, Engine
from gradsync.engines._shared_buffers import SharedBuffers, nothing
from gradsync.engines._torch_privates import check_torch
from gradsync.ranks.lost import is_lost

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from torch.nn.parallel import DistributedDataParallel

    from gradsync.ranks.tables import Tables

# Seconds to sleep until lost reductions have ended. Nobody can wait for them, because torch keeps their futures to
# itself, and one that ends late would write into the buckets of the next reduction. All ranks have begun them, so that
# they end soon. Their workers need the GIL, which a sleep releases.
_LOST_REDUCTION = 0.2


class DDPEngine(Engine):
    """One `DistributedDataParallel`."""

    def __init__(
        self, ddp: DistributedDataParallel, module: nn.Module | None = None, roots: Sequence[nn.Module] | None = None
    ) -> None:
        """`module` is in place of the DDP's own if its forward is not the model's; `roots` have the buffers."""
        self._check(ddp)
        check_torch("ddp", ddp=ddp)
        assert ddp.process_group is not None, "every DistributedDataParallel has one"
        super().__init__(ddp.process_group, ddp._module_parameters)
        self._ddp = ddp
        self._sparse = sparse_parameters(ddp.module if module is None else module)
        self._reduced = [parameter for parameter in ddp._module_parameters if parameter.requires_grad]
        self._shortcut = None if module is not None else shortcut(ddp)
        self._watches: list[Any] = []  # hooks of the armed backward, which also tell that it has come
        self._came_by = False
        if self._reduced and not is_built_for(ddp, self._reduced):
            self._rebuild_reducer()
            insist_on_shapes(self._reduced)
        note_wires(ddp, self._reduced)
        self._wired = list(self._reduced)
        device = ddp._module_parameters[0].device
        self._buffers = SharedBuffers(ddp.process_group, [module or ddp.module] if roots is None else roots, device)

    def _check(self, ddp: DistributedDataParallel) -> None:
        check(ddp)

    @property
    def carrier(self) -> Carrier | None:
        return Carrier(self._ddp)

    # -- window ---------------------------------------------------------------------------------------------------

    def trainable(self) -> bool:
        return bool(self._reduced)

    @property
    def joins(self) -> bool:  # type: ignore[override] # read only
        return bool(self._ddp._join_config.enable)

    def is_wired(self) -> bool:
        return not self._wired or is_wired(self._ddp, self._wired)

    def share_buffers(self, source: int) -> None:
        ddp = self._ddp
        if not self._shares_buffers:
            return
        if hasattr(ddp, "buffer_hook"):  # the user's
            ddp._assign_modules_buffers()
            with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(tuple(ddp.modules_buffers)):
                ddp._sync_module_buffers(source)
        else:
            self._buffers.share(source)

    def send_buffers(self, source: int) -> Callable[[], None]:
        return self._buffers.send(source) if self._shares_buffers else nothing

    @property
    def _shares_buffers(self) -> bool:
        # torch 2.13 renamed it `forward_sync_buffers`, and answers to this name too.
        return bool(self._ddp.broadcast_buffers and self.group.size() > 1)

    # -- micro-batch ----------------------------------------------------------------------------------------------

    def hold(self) -> tuple[bool, bool, Any]:
        # Written through vars(): nn.Module.__setattr__ costs 1.7 us a pair, this 0.05.
        state = vars(self._ddp)
        found = (state["require_backward_grad_sync"], state["require_forward_param_sync"], state.get("forward"))
        state["require_backward_grad_sync"] = state["require_forward_param_sync"] = False
        if self._shortcut is not None and not self.is_compiled and not state["_join_config"].enable:
            state["forward"] = self._shortcut
        return found

    def restore(self, found: tuple[bool, bool, Any]) -> None:
        state = vars(self._ddp)
        state["require_backward_grad_sync"], state["require_forward_param_sync"], forward = found
        if forward is not None:
            state["forward"] = forward
        elif self._shortcut is not None:
            state.pop("forward", None)

    # -- boundary -------------------------------------------------------------------------------------------------

    def arm(self, loss: torch.Tensor | None) -> None:
        vars(self._ddp)["require_backward_grad_sync"] = True  # compiled DDP's python_reducer reads it in backward
        self._prepare(loss)
        if self._sparse:
            self._own_sparse_gradients()
        # The reducer cannot tell a complete reduction from one that has not begun, so hooks tell.
        self._came_by = False
        for node in () if loss is None else nodes_of(self._watched):
            self._watches.append(node.register_prehook(self.note_visit))

    def note_visit(self, *_: object) -> None:
        self._came_by = True

    @contextmanager
    def holding_armed(self) -> Iterator[None]:
        """Like every engine's. It also lets DDP's forward run, which raises while a reduction is half done."""
        state = vars(self._ddp)
        with super().holding_armed():
            state["_pre_forward"], state["_post_forward"] = partial(moved, self._ddp), as_it_is
            try:
                yield
            finally:
                del state["_pre_forward"], state["_post_forward"]

    def finish(self) -> None:
        if self._ddp._use_python_reducer:
            self._forget_watches()
        else:
            self._complete_armed()

    def misuse(self) -> GradSyncError | None:
        unused = [parameter for parameter in self._reduced if parameter.grad is None] if self._fills_unused else []
        return GradSyncError(unused_message(names_of(self.named_parameters(), unused))) if unused else None

    def abort(self) -> None:
        try:
            self._complete_armed()
        except RuntimeError as error:
            if is_lost(error):
                raise
            self._forget_reduction()  # else it would go on in the next backward, and refuse DDP's own forward

    def _complete_armed(self) -> None:
        if self._is_untouched():
            self.reduce()
        else:
            self._complete(self._unready())

    def reduce(self) -> None:
        self._prepare(None)
        self._complete(self._reduced)

    def reduce_together(self, tables: Tables) -> None:
        known = self._reduced if self._fills_unused else ()
        used = used_anywhere(known, tables) if known else ()
        self.reduce()
        forget_unused(known, used)

    # -- the reducer ----------------------------------------------------------------------------------------------

    def _is_untouched(self) -> bool:
        """Whether the armed backward reached none of these parameters."""
        self._forget_watches()
        if self._came_by:
            return False
        # The watched parameter may have gone unused. The reduction is then incomplete, and the reducer raises.
        try:
            self._ddp.reducer._check_reducer_finalized()
        except RuntimeError:
            return False
        return True

    def _own_sparse_gradients(self) -> None:
        """Copy sparse gradients: the reducer divides them in place, and their values may be another one's, too."""
        self._watches += [p.register_hook(torch.clone) for p in self._reduced if id(p) in self._sparse]

    def _forget_watches(self) -> None:
        vars(self._ddp)["require_backward_grad_sync"] = False  # what the body runs after its backward stays local
        while self._watches:
            self._watches.pop().remove()

    def _prepare(self, loss: torch.Tensor | None) -> None:  # noqa: ARG002 - for those that search a graph
        """Have the reducer wait for the backward of `loss`; None: for any."""
        self._rebuild_buckets()  # due where its user has run one backward of his own
        self._reducer.prepare_for_forward()
        self._reducer.prepare_for_backward([])

    @property
    def _watched(self) -> Sequence[nn.Parameter]:
        """Parameters of which the backward has reached one, at least, if the reduction is complete."""
        return self._reduced[:1]

    @property
    def _fills_unused(self) -> bool:
        """Whether a reduction gives zeros to parameters that no rank has used."""
        return not self._ddp._use_python_reducer

    @property
    def _orders_buckets(self) -> bool:
        """Whether the reducer orders its buckets after the first reduction."""
        return True

    @property
    def _reducer(self) -> Any:
        return self._ddp.reducer  # torch's stubs know half of it

    def named_parameters(self) -> Iterable[tuple[str, nn.Parameter]]:
        """The parameters by the names that their user knows."""
        return self._ddp.module.named_parameters()

    def _touch(self, parameters: Sequence[nn.Parameter]) -> torch.Tensor:
        """A scalar whose backward runs the reducer's hooks of `parameters`, and adds nothing to any gradient."""
        for parameter in parameters:
            if parameter.grad is None and id(parameter) in self._sparse:
                # The reducer refuses an undefined gradient for a sparse parameter, but takes an empty one.
                none = torch.zeros((1, 0), dtype=torch.int64, device=parameter.device)
                # Not a view of the parameter: a gradient that is added in place would be written into its memory.
                values = parameter.detach().new_empty((0, *parameter.shape[1:]))
                parameter.grad = torch.sparse_coo_tensor(none, values, parameter.shape, check_invariants=False)
        return joined(parameters)

    def _unready(self) -> list[nn.Parameter]:
        """The parameters whose hooks the armed backward did not run."""
        try:
            self._ddp.reducer._check_reducer_finalized()
        except RuntimeError as error:
            # Only the reducer's message tells which.
            found = re.search(r"did not receive grad for rank \d+: ([\d ]+)", str(error))
            if found is None:
                raise
            return [self._reduced[int(index)] for index in found[1].split()]
        return []

    def _complete(self, missing: Sequence[nn.Parameter]) -> None:
        """Run the hooks of the parameters that a backward has not reached, and so complete the reduction."""
        self._run_hooks(missing)
        self._rebuild_buckets()

    def _run_hooks(self, parameters: Sequence[nn.Parameter]) -> None:
        """Run the reducer's hooks of parameters, and nobody else's."""
        if parameters:
            with silent(parameters):
                self._touch(parameters).backward()

    def _rebuild_buckets(self) -> None:
        """Order the buckets after the first reduction.

        DDP would do so in its next forward, but other ranks may run none.
        """
        state = vars(self._ddp)
        if "_gradsync_keeps_buckets" in state:
            self._ddp.reducer._reset_state()
        elif self._ddp.reducer._rebuild_buckets():
            self._ddp._has_rebuilt_buckets = True

    def _forget_reduction(self) -> None:
        """Reset the reducer after a failed backward that can no longer be completed by hand.

        Either all gradients had been sent already, or the reducer itself failed. What the reducer had queued for the
        end of that backward is lost, and its state can only be reset as a whole. It then wants to order its buckets
        again, together with all ranks, but these have no reason to. So the buckets are ordered now if that is due on
        all ranks, and otherwise kept as they are.
        """
        reducer = self._ddp.reducer
        device = self._reduced[0].device
        if device.type != "cpu":
            torch.accelerator.synchronize(device)  # reductions are queued there: wait until they have run
        time.sleep(_LOST_REDUCTION)
        reducer._reset_state()
        if not self._orders_buckets:
            return
        if self._ddp._has_rebuilt_buckets:
            vars(self._ddp)["_gradsync_keeps_buckets"] = True
        else:
            reducer._push_all_rebuilt_params()
            self._rebuild_buckets()

    def forget_reducer(self) -> None:
        """Let go of the reducer, and with it of autograd's nodes of parameters that were resized in place."""
        vars(self._ddp).update(reducer=None, logger=None)
        WIRES.pop(self._ddp, None)

    def _rebuild_reducer(self) -> None:
        """Make a reducer for the parameters that are trainable now, with the user's communication hooks."""
        ddp = self._ddp
        kind, _, name = ddp._get_ddp_logging_data().get("comm_hook", "").partition(".")
        builtin = name if kind == "BuiltinCommHookType" else None  # DDP itself keeps only Python hooks
        ddp.reducer._remove_autograd_hooks()
        WIRES.pop(ddp, None)
        vars(ddp).pop("_gradsync_keeps_buckets", None)
        ddp._has_rebuilt_buckets = False
        if any(map(is_resized, self._reduced)):
            self.forget_reducer()
        # Parameters that the module got after it was wrapped belong to another engine.
        mine, ignored = set(map(id, self._reduced)), ddp.parameters_to_ignore
        ddp.parameters_to_ignore = {*ignored, *(name for name, p in own_names(ddp.module) if id(p) not in mine)}
        try:
            parameters, sparse = ddp._build_params_for_reducer()
            names = ddp._build_debug_param_to_name_mapping(parameters)
        finally:
            ddp.parameters_to_ignore = ignored
        ddp._ddp_init_helper(parameters, sparse, names, ddp.static_graph)
        for hook, state in ddp._comm_hooks:
            dist._register_comm_hook(ddp.reducer, state, hook)
        if builtin is not None:
            ddp._register_builtin_comm_hook(getattr(dist.BuiltinCommHookType, builtin))
