"""The DDP that gradsync makes for bare modules and loose parameters. Only its reducer is used: its forward never runs.

The caller's modules stay as they are: no wrapper, no attribute, nothing that deepcopy or pickle would see. The engine
holds the parameters but not the modules, so that a table can find it by a module and drops it with the module.

The DDP has one parameter that the model does not have, the ledger. Its gradient is a flag for each parameter: whether
this rank has used it. gradsync writes the flags after the backward, and the reducer adds them up like the other
gradients. So a parameter that no rank used keeps `grad is None`, although DDP does not look for unused parameters. The
ledger has a dtype of its own, and therefore a bucket of its own. In another bucket it would shift the gradients, and
change the order in which three ranks or more add them up.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gradsync._errors import GradSyncError
from gradsync.engines._ddp import DDPEngine
from gradsync.engines._ddp_usable import insist_on_shapes, note_wires
from gradsync.engines._protocol import Carrier
from gradsync.engines._to_device import flags_on

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence


class Rest(NamedTuple):
    """The parameters that no engine covers, and where they are."""

    roots: Sequence[nn.Module]  # modules that have them
    loose: Sequence[nn.Parameter]  # those in none of the modules
    covered: Collection[int]  # ids of parameters in the modules that other engines have
    parameters: Sequence[nn.Parameter]  # the trainable ones of both


class BehindEngine(DDPEngine):
    """The DDP behind parameters that are in no engine of the user's."""

    arms_replays = False  # the reducer would write to a sparse gradient of the replay

    def __init__(self, rest: Rest, group: dist.ProcessGroup | None) -> None:
        super().__init__(_make(rest, group), nn.ModuleList(rest.roots), rest.roots)
        self._ledger, *self._reduced = self._reduced
        self.parameters = list(self._reduced)
        insist_on_shapes(self._reduced)
        self._likeness = [(p.dtype, p.device, p.shape) for p in self._reduced]
        self._all_used: torch.Tensor | None = None  # the ledger's gradient if this rank has used everything

    def _check(self, ddp: DistributedDataParallel) -> None:
        """Nothing to check: gradsync has made this DDP."""

    @property
    def ddp(self) -> DistributedDataParallel:
        """The DDP itself; its `module` is gone."""
        return self._ddp

    @property
    def carrier(self) -> Carrier:
        return Carrier(self._ddp, self._ledger, self._reduced)

    def is_for(self, parameters: Sequence[nn.Parameter], group: dist.ProcessGroup | None) -> bool:
        """Whether it was made for exactly these parameters, in their present form, on this group."""
        over = dist.group.WORLD if group is None else group
        return (
            self.group is over
            and len(parameters) == len(self.parameters)
            and all(mine is other for mine, other in zip(self.parameters, parameters, strict=True))
            and self._likeness == [(p.dtype, p.device, p.shape) for p in parameters]
            and self.is_wired()
        )

    @property
    def is_outgrown(self) -> bool:
        """Whether a parameter was resized in place or has another node: the reducer can never reduce again."""
        resized = any(one[2] != p.shape for one, p in zip(self._likeness, self.parameters, strict=True))
        return resized or not self.is_wired()

    def arm(self, loss: torch.Tensor | None) -> None:
        self._prepare(loss)
        if self._sparse:
            self._own_sparse_gradients()

    def finish(self) -> None:
        self._close(None)

    def _complete_armed(self) -> None:
        self._close(None)  # the reduction still waits for the ledger, so nothing has been lost

    @property
    def _fills_unused(self) -> bool:
        return False  # the ledger tells

    def reduce(self) -> None:
        self.arm(None)
        self._close(self._reduced)

    def _close(self, unreached: Sequence[nn.Parameter] | None) -> None:
        """Write the ledger, complete the reduction, and read the ledger.

        `unreached` are the parameters whose hooks have not run; None: the reducer tells which.
        """
        if self._watches:
            self._forget_watches()
        used = [parameter.grad is not None for parameter in self._reduced]
        everything = all(used)
        self._ledger.backward(self._flags(used, everything=everything))
        if unreached is None:
            unreached = self._unready()
        self._run_hooks(unreached)
        self._ddp.reducer._rebuild_buckets()
        total, self._ledger.grad = self._ledger.grad, None
        assert total is not None, "the reducer leaves a gradient at every parameter"
        if everything:
            return
        for parameter, anywhere in zip(self._reduced, total.tolist(), strict=True):
            if not anywhere:
                parameter.grad = None

    def _flags(self, used: Sequence[bool], *, everything: bool) -> torch.Tensor:
        """The ledger's gradient: which parameters this rank has used. If it has used all, nothing is copied."""
        if not everything:
            return flags_on(self._ledger.device, used, self._ledger.dtype)
        if self._all_used is None:
            self._all_used = torch.ones_like(self._ledger, requires_grad=False)
        return self._all_used

    def _unready(self) -> list[nn.Parameter]:
        both = self._reduced
        self._reduced = [self._ledger, *both]  # the reducer counts the ledger, too
        try:
            return super()._unready()
        finally:
            self._reduced = both


def _make(rest: Rest, group: dist.ProcessGroup | None) -> DistributedDataParallel:
    parameters = rest.parameters
    taken = {parameter.dtype for parameter in parameters}
    dtype = next((d for d in (torch.float64, torch.float32, torch.float16, torch.bfloat16) if d not in taken), None)
    if dtype is None:
        raise GradSyncError(
            "A bare model on several ranks may have parameters of three of these dtypes, because flags travel in the "
            "fourth, but it has them of float64, float32, float16 and bfloat16. Put it on DistributedDataParallel, or "
            "cast those of one dtype."
        )
    shell = nn.Module()
    # DDP reduces its buckets in reverse order: no other gradient waits for the first parameter.
    shell.ledger = nn.Parameter(torch.zeros(len(parameters), dtype=dtype, device=parameters[0].device))
    ignored: list[str] = []
    mine = set(map(id, parameters))
    for place, root in enumerate(rest.roots):
        shell.add_module(f"root{place}", root)
        synchronised = {name for name, p in root.named_parameters() if id(p) in mine}
        theirs = set(getattr(root, "_ddp_params_and_buffers_to_ignore", ())) - synchronised
        ignored += [f"root{place}.{name}" for name in theirs]
        ignored += [f"root{place}.{name}" for name, p in root.named_parameters() if id(p) in rest.covered]
    for place, parameter in enumerate(rest.loose):
        shell._parameters[f"loose{place}"] = parameter  # it may be a plain tensor, which a module would not take
    shell._ddp_params_and_buffers_to_ignore = ignored  # type: ignore[assignment]
    ddp = DistributedDataParallel(shell, process_group=group)
    note_wires(ddp, [parameter for parameter in ddp._module_parameters if parameter.requires_grad])
    ddp._modules.clear()
    ddp.modules_buffers, ddp.named_module_buffers = [], {}
    return ddp
