"""How the gradients of a window travel to the other ranks: the engines' own way, or that of overlap or compress."""

from __future__ import annotations

from gradsync.functional._team.team import Team
from gradsync.functional._window.window import Window


class Transport:
    """How the gradients of a run's windows travel to the other ranks: here, the engines' own way."""

    #: Whether a window closes before its gradients have arrived. Then nothing else may be sent behind them.
    closes_before = False

    def check(self, team: Team) -> None:
        """Raise for a team whose gradients cannot travel this way. Asked when a window opens."""

    def carry(self, window: Window) -> None:
        """The gradients of a window are about to synchronise."""

    def carried(self, window: Window) -> None:
        """They have, or have failed to."""
