"""`GradientWatch`: notices that other code has changed the gradients of an open window."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter, is_not

import torch
from torch import nn

from gradsync.functional._team.team import Team
from gradsync.functional._update.gradients import is_there

_GRADIENT = attrgetter("grad")


class GradientWatch:
    """Compares the gradients of a window with what its last micro-batch has left.

    A backward may reach a single layer, so each gradient is looked at (0.2 us each). Gradients inside
    engines are only counted, and only before a window's first micro-batch.
    """

    __slots__ = ("_left", "_watched", "team")

    def __init__(self) -> None:
        self.team: Team | None = None
        self._watched: Sequence[nn.Parameter] = ()
        # Each gradient after the last micro-batch, with its version; None if nothing is accumulated.
        self._left: tuple[list[torch.Tensor | None], list[int]] | None = None

    def watch(self, team: Team) -> None:
        """Watch the gradients of this team, except those of parameters that are in none of its optimizers."""
        self.team, self._left = team, None
        self._watched = team.watchable

    def remember(self) -> None:
        """Called after a micro-batch."""
        gradients = [*map(_GRADIENT, self._watched)]
        self._left = gradients, [gradient._version for gradient in gradients if gradient is not None]

    def forget(self) -> None:
        """Called after the gradients were cleared."""
        self._left = None

    def change(self) -> str | None:
        """What has become of the gradients since then, in words; None if they are as they were left."""
        now = [*map(_GRADIENT, self._watched)]
        if self._left is None:
            return _CHANGED if self._has_any(now) else None
        before, versions = self._left
        if not any(map(is_not, now, before)) and versions == [g._version for g in now if g is not None]:
            return None
        vanished = any(new is None and old is not None for new, old in zip(now, before, strict=True))
        return _VANISHED if vanished else _CHANGED

    def appeared(self) -> bool:
        """Whether a parameter has a gradient now that had none then."""
        before = self._left[0] if self._left is not None else [None] * len(self._watched)
        now = map(_GRADIENT, self._watched)
        return any(map(is_there, (new for old, new in zip(before, now, strict=True) if old is None)))

    def _has_any(self, now: Sequence[torch.Tensor | None]) -> bool:
        if any(map(is_there, now)):
            return True
        team = self.team
        if team is None or not team.holds_inside:
            return False
        # Where engines move all storage, no parameter is watched.
        return bool(team.num_inside()) if now else any(team.gradients_left())


_VANISHED = "vanished: something called zero_grad()"
_CHANGED = "changed: something ran backward on them, or clipped, unscaled or divided them"
