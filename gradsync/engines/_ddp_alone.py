"""DDP in a group of one rank: nothing is sent. DDP itself would all-reduce over that one rank."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gradsync.engines._ddp import DDPEngine

if TYPE_CHECKING:
    import torch
    from torch.nn.parallel import DistributedDataParallel


class AloneEngine(DDPEngine):
    """One `DistributedDataParallel` in a group of one rank, without a communication hook that sees gradients."""

    @staticmethod
    def fits(ddp: DistributedDataParallel) -> bool:
        """Whether `ddp` can have this engine."""
        searched = ddp.find_unused_parameters or ddp.static_graph
        hooked = ddp._comm_hooks or "comm_hook" in ddp._get_ddp_logging_data()
        return ddp.process_group is not None and ddp.process_group.size() == 1 and not searched and not hooked

    # A communication hook may be registered later: then DDP's reducer runs, so that it sees the gradients.

    def is_wired(self) -> bool:
        return not self._ddp._comm_hooks or super().is_wired()

    def arm(self, loss: torch.Tensor | None) -> None:
        if self._ddp._comm_hooks:
            super().arm(loss)

    def finish(self) -> None:
        if self._ddp._comm_hooks:
            super().finish()

    def abort(self) -> None:
        if self._ddp._comm_hooks:
            super().abort()

    def reduce(self) -> None:
        if self._ddp._comm_hooks:
            super().reduce()
