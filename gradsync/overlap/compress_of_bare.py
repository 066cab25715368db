"""`compress`: the gradients of a call travel in bfloat16."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from gradsync._errors import GradSyncError
from gradsync.functional import Team, Transport, Window
from gradsync.overlap import Travel
from gradsync.overlap.travel_hook import travel_of


class Compressed(Transport):
    """The transport of a call with `compress`. Tables and flags travel as they are."""

    def check(self, team: Team) -> None:
        """Raise for engines whose gradients gradsync does not send itself."""
        for engine in team.engines if team.num_ranks > 1 else ():
            if engine.carrier is None or engine.carrier.ledger is None:
                raise GradSyncError(
                    'accumulating(..., compress="bf16") needs a bare model, whose gradients gradsync itself sends, but '
                    f"this one is on an engine of its own ({type(engine).__name__}). Hand over the bare model, or, for "
                    'a DistributedDataParallel, make it with gradsync.ddp(model, compress="bf16") and leave compress '
                    "out."
                )

    def carry(self, window: Window) -> None:
        """Its gradients are about to synchronise."""
        for travel in travels_of(window):
            travel.dtype = torch.bfloat16

    def carried(self, window: Window) -> None:
        """They have, or have failed to."""
        for travel in travels_of(window):
            travel.dtype = None


def travels_of(window: Window) -> Sequence[Travel]:
    """The states of the communication hooks of a window's engines; none on a single rank."""
    carriers = [engine.carrier for engine in window.active] if window.team.num_ranks > 1 else []
    return [travel_of(one.ddp, ledger=one.ledger, flagged=one.flagged) for one in carriers if one is not None]
