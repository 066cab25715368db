"""DDP with a static graph.

Its first reduction runs at the end of its very first backward. DDP's forward arranges that; here `arm` does. The
reducer's hooks count how often they run, so they must not be run by hand: `reduce` reduces bucket by bucket.

torch keeps two records of that first reduction. On each rank it counts the hooks that ran. It raises if a
synchronising backward runs other hooks than the first did. It does not notice hooks that ran in held backwards, or that
did not run. `misuse` checks those. The other record, `_get_local_used_map`, lies on the device: before the reduction it
is not initialised, and then it has on how many ranks each parameter was used. Ranks may use parameters of their own, so
each remembers itself what it used.

Private in torch, beside what `_ddp.py` names (read in torch 2.13): `_delay_all_reduce`, `_get_local_used_map`,
`_run_comm_hook`, `_set_static_graph`, `_static_graph_delay_allreduce_enqueued`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch
from torch.autograd import Variable

from gradsync._errors import GradSyncError
from gradsync.engines._buckets import gradients_in
from gradsync.engines._ddp import DDPEngine
from gradsync.engines._ddp_unused import changed_message, forget_unused, names_of, used_anywhere

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    from gradsync.ranks.tables import Tables

_USED_HERE = "_gradsync_used_here"  # whether this rank used it in its very first micro-batch, by parameter
_USED_ANYWHERE = "_gradsync_used_anywhere"  # on how many ranks that was so
_HALF = "_gradsync_knows_half"  # whether its very first backward failed before all parameters were reached
_HELD = "_gradsync_held_before_first"  # the hook of a DDP that was held before its very first synchronisation


class StaticEngine(DDPEngine):
    """One `DistributedDataParallel` with `static_graph=True`."""

    def __init__(self, ddp: DistributedDataParallel, module: nn.Module | None = None) -> None:
        self.owes_first = not ddp._static_graph_delay_allreduce_enqueued
        self._is_first = False  # whether the armed backward is the very first
        self._had: list[bool] = []  # which parameters had a gradient before it
        super().__init__(ddp, module)

    def hold(self) -> object:  # type: ignore[override]
        found = super().hold()
        if self.owes_first:
            self._ddp._static_graph_delay_allreduce_enqueued = True  # so that DDP's forward does not arrange it
        return found

    def restore(self, found: object) -> None:
        super().restore(found)  # type: ignore[arg-type]
        if self.owes_first:
            self._ddp._static_graph_delay_allreduce_enqueued = False
            state = vars(self._ddp)
            # The user may run DDP without gradsync from here on: before that forward, the held backwards are forgotten.
            if _HELD not in state:
                state[_HELD] = self._ddp.register_forward_pre_hook(_begin_in_forward)

    def arm(self, loss: torch.Tensor | None) -> None:
        self._begin_graph_anew()
        super().arm(loss)
        self._is_first = self.owes_first
        if self.owes_first:
            self._had = [parameter.grad is not None for parameter in self._reduced]
            self._ddp._static_graph_delay_allreduce_enqueued, self.owes_first = True, False
            if loss is None:
                self._queue_delayed_reduction()
            else:
                loss.register_hook(lambda _: self._queue_delayed_reduction())

    def trainable(self) -> bool:
        if _HALF in vars(self._ddp):
            raise GradSyncError(
                "The very first backward of a DDP with static_graph=True must succeed on every rank, because torch "
                "learns in it what the graph is, but that of this DDP failed half-way. Make the DDP anew, or leave "
                "static_graph out."
            )
        return super().trainable()

    def abort(self) -> None:
        if not self._is_first:
            super().abort()
            return
        self._reduce_first()  # it was queued for the end of the backward
        if not all(vars(self._ddp)[_USED_HERE]):
            vars(self._ddp)[_HALF] = True

    def finish(self) -> None:
        if self._is_first:
            self._forget_watches()
            self._complete(self._unready())
        else:
            super().finish()

    def _complete_armed(self) -> None:
        if not self._is_untouched():
            self._complete(self._unready())
            return
        # `reduce` leaves the reducer armed: it would reduce in the next held backward. It is reset as a whole, and then
        # wants to order its buckets again, which is due now on all ranks, or never.
        self._reducer._reset_state()
        if self._ddp._has_rebuilt_buckets:
            vars(self._ddp)["_gradsync_keeps_buckets"] = True
        self.reduce()

    def misuse(self) -> GradSyncError | None:
        if self.owes_first:
            return None  # `reduce` has more to say
        # What this rank itself used is not known of a first reduction without gradsync.
        here = vars(self._ddp).get(_USED_HERE) or self._used_anywhere()
        came = [parameter.grad is not None for parameter in self._reduced]
        if came == here:
            return None
        rows = list(zip(self._reduced, came, here, self._used_anywhere(), strict=True))
        unused = [parameter for parameter, now, then, _ in rows if then and not now]
        new = [parameter for parameter, now, _, anywhere in rows if now and not anywhere]
        if not unused and not new:
            return None
        return GradSyncError(changed_message(*(names_of(self.named_parameters(), some) for some in (unused, new))))

    def reduce_together(self, tables: Tables) -> None:
        self.reduce(used_anywhere(self._reduced, tables))

    def reduce(self, used: Sequence[object] | None = None) -> None:
        """Like every engine's. `used` has the parameters that ranks used, by default those of the first micro-batch."""
        if self.owes_first:
            raise GradSyncError(
                "The first synchronisation of a DDP with static_graph=True must be that of a backward, in which it "
                "learns what the graph is, but gradients are to be synchronised that were all held back. Synchronise "
                "in the backward of the first window, or leave static_graph out."
            )
        # A communication hook averages; without one the reducer divides before it sums.
        share = 1.0 if "comm_hook" in self._ddp._get_ddp_logging_data() else 1.0 / self.group.size()
        for bucket in self._reducer._get_zeros_like_grad_buckets():
            for parameter, view in gradients_in(bucket):
                if parameter.grad is not None:
                    torch.mul(parameter.grad, share, out=view)
            averaged = self._reducer._run_comm_hook(bucket).wait()
            bucket.set_buffer(averaged[0] if isinstance(averaged, list) else averaged)
            for parameter, view in gradients_in(bucket):
                if parameter.grad is None:
                    parameter.grad = view.clone()
                else:
                    parameter.grad.copy_(view)
        forget_unused(self._reduced, self._used_anywhere() if used is None else used)
        vars(self._ddp)["_gradsync_reductions"] = vars(self._ddp).get("_gradsync_reductions", 0) + 1  # for audit
        # Ranks in a real backward rebuild their buckets after this reduction, if they have not yet: so must this rank.
        self._reducer._push_all_rebuilt_params()
        self._rebuild_buckets()

    @property
    def _watched(self) -> Sequence[nn.Parameter]:
        return self._reduced  # any of them may go unused

    @property
    def _fills_unused(self) -> bool:
        return False

    def _begin_graph_anew(self) -> None:
        """Forget backwards that were held before the very first synchronisation.

        torch counted their hooks. It would expect every later backward to run each hook that often, and would
        synchronise none of them, without an error.
        """
        watch = vars(self._ddp).pop(_HELD, None)
        if watch is not None:
            watch.remove()
            if self.owes_first:
                self._rebuild_reducer()

    def _rebuild_reducer(self) -> None:
        super()._rebuild_reducer()
        vars(self._ddp).pop(_USED_HERE, None)
        vars(self._ddp).pop(_USED_ANYWHERE, None)
        vars(self._ddp).pop(_HALF, None)
        self._ddp._static_graph_delay_allreduce_enqueued, self.owes_first = False, True
        self._reducer._set_static_graph()

    def _queue_delayed_reduction(self) -> None:
        Variable._execution_engine.queue_callback(self._reduce_first)

    def _reduce_first(self) -> None:
        came = [parameter.grad is not None for parameter in self._reduced]
        vars(self._ddp)[_USED_HERE] = [now and not before for now, before in zip(came, self._had, strict=True)]
        self._reducer._delay_all_reduce()

    def _used_anywhere(self) -> list[bool]:
        state = vars(self._ddp)
        if _USED_ANYWHERE not in state:  # to read it is to wait for the device: once
            state[_USED_ANYWHERE] = [bool(count) for count in self._reducer._get_local_used_map().tolist()]
        return cast("list[bool]", state[_USED_ANYWHERE])


def _begin_in_forward(ddp: DistributedDataParallel, *_: object) -> None:
    if ddp.require_backward_grad_sync and torch.is_grad_enabled():
        StaticEngine(ddp)._begin_graph_anew()
