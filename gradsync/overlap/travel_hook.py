"""Registers the hook on a `DistributedDataParallel`, once.

Private in torch (read in torch 2.13; tests/overlap/test_travel.py fails when it changes): `ddp._comm_hooks`, and
"comm_hook" in `ddp._get_ddp_logging_data()`, which alone tells of hooks that are not written in Python.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gradsync._errors import GradSyncError
from gradsync.overlap.travel import Travel, travel


def travel_of(
    ddp: DistributedDataParallel,
    *,
    ledger: nn.Parameter | None = None,
    flagged: Sequence[nn.Parameter] = (),
) -> Travel:
    """Register the hook on `ddp` if it is not there yet, and return its state. Not collective.

    Only the DDP behind bare modules has a `ledger`, with flags for the parameters in `flagged`.
    """
    for hook, state in ddp._comm_hooks:
        if hook is travel and isinstance(state, Travel):
            if state.group is None:
                _register_again(ddp, state)
            state.group, state.ledger, state.flagged = ddp.process_group, ledger, flagged
            return state
    if foreign := foreign_hook(ddp):
        raise GradSyncError(
            "Gradients that travel while the next window computes (overlap), or in bfloat16 (compress), need the "
            "communication hook of their DistributedDataParallel, of which torch takes one. But this one has "
            f"{foreign} already. Leave that hook out, or overlap and compress."
        )
    state = Travel(ddp.process_group, ledger, flagged)
    ddp.register_comm_hook(state, travel)
    return state


def foreign_hook(ddp: DistributedDataParallel) -> str:
    """The name of the communication hook that somebody else has registered on `ddp`; empty if there is none."""
    for hook, state in ddp._comm_hooks:
        if not (hook is travel and isinstance(state, Travel)):
            return str(getattr(hook, "__qualname__", type(hook).__qualname__))
    if ddp._comm_hooks:
        return ""
    data: Mapping[str, Any] = ddp._get_ddp_logging_data()
    return str(data.get("comm_hook", ""))


def _register_again(ddp: DistributedDataParallel, state: Travel) -> None:
    """Register with a reducer that unpickling has made, unless whoever rebuilt it has registered the hook."""
    ddp._comm_hooks.clear()
    try:
        ddp.register_comm_hook(state, travel)
    except RuntimeError as error:
        if "once" not in str(error):
            raise
    # Registered now, or refused because it was registered already: the list has the hook once.
    ddp._comm_hooks[:] = [(travel, state)]
