"""How the gradients of a window travel to the other ranks: the engines' own way, or that of overlap or compress."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from gradsync.functional._backward import NO_RANGE

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from gradsync.functional._team import Team
    from gradsync.functional._window import Window


class Transport(Protocol):
    """How the gradients of a run's windows travel to the other ranks."""

    #: Whether a window closes before its gradients have arrived. Then nothing else may be sent behind them.
    closes_before: bool

    def check(self, team: Team) -> None:
        """Raise for a team whose gradients cannot travel this way. Asked when a window opens."""

    def carrying(self, window: Window) -> AbstractContextManager[Any]:
        """A context for the synchronisation of a window."""
        ...


class EnginesOwn:
    """The engines' own way."""

    closes_before = False

    def check(self, team: Team) -> None: ...

    def carrying(self, window: Window) -> AbstractContextManager[Any]:  # noqa: ARG002 - that of the protocol
        return NO_RANGE
