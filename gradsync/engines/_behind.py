"""DDP behind a bare module: made for its reducer alone, its forward never called.

The caller keeps the module as it was: no wrapper, no attribute, nothing that deepcopy or pickle would see. What is
made here holds the parameters but not the module, so that it can be looked up by the module and dies with it.

One parameter more than the model has takes part: the ledger. Its gradient is written by us after the backward, and is
reduced with the others. It says which parameters were used at all, so that one that
no rank used keeps `grad is None` although DDP does not look for unused parameters; and it carries the table of
`Engine.settle`.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gradsync.engines._ddp import DDPEngine, same
from gradsync.engines._protocol import TABLE_WIDTH, Table

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence


_EXACT = (torch.float32, torch.float64)  # in which a table survives its travel


class BehindEngine(DDPEngine):
    """The DDP behind one bare module, for its parameters that no other engine covers."""

    carries = True

    def __init__(
        self, module: nn.Module, covered: Collection[int] = (), group: dist.ProcessGroup | None = None
    ) -> None:
        self._over = group  # the ranks of the engines that cover the rest of the module, if any do
        self._module = weakref.ref(module)
        self._covered = frozenset(covered)
        super().__init__(self._make(module, first=True), module)
        self.parameters = [parameter for parameter in module.parameters() if id(parameter) not in self._covered]

    @property
    def ddp(self) -> DistributedDataParallel:
        """The DDP itself; its `module` is gone."""
        return self._ddp

    def trainable(self) -> bool:
        now = [parameter for parameter in self.parameters if parameter.requires_grad]
        if now and not same(now, self._reduced[1:]):
            module = self._module()
            assert module is not None, "the caller holds the module"
            self._ddp.reducer._remove_autograd_hooks()
            self._ddp = self._make(module, first=False)
            self._reduced = [self._ddp._module_parameters[0], *now]
        return bool(now)

    def open(self, source: int) -> None:
        module = self._module()
        if module is None or self.group.size() == 1:
            return
        if buffers := list(module.buffers()):
            with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(tuple(buffers)):
                dist._broadcast_coalesced(self.group, buffers, self._ddp.broadcast_bucket_size, source)

    def arm(self, loss: torch.Tensor | None) -> None:  # noqa: ARG002 - DDP's protocol, without its search for unused ones
        self._ddp.reducer.prepare_for_forward()
        self._ddp.reducer.prepare_for_backward([])

    def settle(self, table: Table = ()) -> Table | None:
        return self._close(table, rest=None)

    def abort(self, table: Table = ()) -> Table | None:
        return self._close(table, rest=None)  # the ledger, last of all, is still to come: nothing can have been lost

    def reduce(self, table: Table = ()) -> Table | None:
        self.arm(None)
        return self._close(table, rest=self._reduced[1:])

    def _close(self, table: Table, rest: Sequence[nn.Parameter] | None) -> Table | None:
        """Write the ledger, complete the reduction with it, and read it; `rest` is what still has to run its hooks."""
        ledger, parameters = self._reduced[0], self._reduced[1:]
        used = [parameter.grad is not None for parameter in parameters]
        row = torch.tensor([*used, *table], dtype=ledger.dtype, device=ledger.device)
        if row.numel() != ledger.numel():
            row = torch.cat([row, row.new_zeros(ledger.numel() - row.numel())])
        ledger.backward(row)
        if rest is None:
            rest = self._unready()
        if rest:
            self._touch(rest).backward()
        self._ddp.reducer._rebuild_buckets()
        total, ledger.grad = ledger.grad, None
        assert total is not None, "the reducer leaves a gradient at every parameter"
        if not table and all(used):
            return ()
        summed: list[float] = (total.double() * self.group.size()).round().tolist()
        for parameter, anywhere in zip(parameters, summed, strict=False):
            if not anywhere:
                parameter.grad = None
        return summed[len(used) : len(used) + len(table)]

    def _make(self, module: nn.Module, *, first: bool) -> DistributedDataParallel:
        parameters = [p for p in module.parameters() if p.requires_grad and id(p) not in self._covered]
        like = parameters[0]
        room = len(parameters) + TABLE_WIDTH * dist.get_world_size(self._over)  # the flags, and a table
        dtype = like.dtype
        if dtype not in _EXACT or dist.get_world_size(self._over) > 2:
            # A dtype of its own gives it a bucket of its own. In one with other gradients it shifts these, and with
            # them the order in which three ranks or more add them up; as it is, all is bitwise what DDP computes. The
            # sum of two ranks has one order only, and so two spare themselves the extra bucket.
            dtype = torch.float64 if any(p.dtype != torch.float64 for p in parameters) else torch.float32
        shell = nn.Module()
        # First in order is last among DDP's buckets, where it keeps no other gradient waiting.
        shell.ledger = nn.Parameter(torch.zeros(room, dtype=dtype, device=like.device))
        shell.module = module
        shell._ddp_params_and_buffers_to_ignore = [  # type: ignore[assignment]
            *(f"module.{name}" for name in getattr(module, "_ddp_params_and_buffers_to_ignore", ())),
            *(f"module.{name}" for name, p in module.named_parameters() if id(p) in self._covered),
        ]
        ddp = DistributedDataParallel(shell, process_group=self._over, init_sync=first)
        ddp._modules.clear()
        ddp.modules_buffers, ddp.named_module_buffers = [], {}
        return ddp
