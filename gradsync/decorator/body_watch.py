"""`BodyWatch`: raises if the user's code changes gradients in the middle of a window."""

from __future__ import annotations

from gradsync._errors import GradSyncError
from gradsync.functional import GradientWatch, Team


class BodyWatch(GradientWatch):
    """Raises if a window begins with gradients, or if a body or anything between two calls changes them."""

    __slots__ = ("_name",)

    def __init__(self, name: str) -> None:
        """`name` is the name of the function."""
        super().__init__()
        self._name = name

    def begin(self, team: Team) -> None:
        """Called when a window opens. The first window of a team must find no gradients."""
        if team is self.team:
            return
        self.watch(team)
        left, inside = team.gradients_left()
        if left or inside:
            drop = "gradsync.sync_gradients(model) and " if inside else ""
            raise GradSyncError(
                f"A window must begin without gradients, but {left or inside} parameters have one as {self._name} "
                f"begins its first. Call {drop}optimizer.zero_grad() after your own backwards. If they are of a "
                f"window that another {self._name}, or another function, left open, call its flush() or reset() before "
                "it goes."
            )

    def check(self) -> None:
        """Raise if the gradients are not as they were left."""
        change = self.change()
        if change is not None:
            raise GradSyncError(
                f"{self._name} runs backward, step and zero_grad itself, but since its last micro-batch the gradients "
                f"{change}, in its body or between two calls. Return the unscaled loss and leave the rest to the "
                "decorator: accumulating(..., clip_norm=1.0) clips."
            )
