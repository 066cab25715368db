"""`Orphaned`: windows that were open when their optimizer died, because the user made a new optimizer."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from gradsync._errors import GradSyncError
from gradsync.engines import find
from gradsync.functional import Run, Who, discard

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch import nn


class Orphaned:
    """The participants whose windows were open when their optimizer died; held weakly."""

    def __init__(self, name: str) -> None:
        """`name` is the name of the function."""
        self._name = name
        self._left: list[Who] = []

    def note(self, run: Run) -> None:
        """The optimizer of this run has died."""
        if run.index:
            self._left.append(run.who)

    def forget(self) -> None:
        """The open windows are dropped on purpose."""
        self._left.clear()

    def check(self, models: Sequence[nn.Module], runs: Iterable[Run]) -> None:
        """Raise if `models` are called with other optimizers in the middle of a window of theirs.

        `runs` are the runs of optimizers that are alive. Such a run may be in the middle of a window (a GAN), but then
        its models still have all the parameters with which the window was opened.
        """
        mine = set(map(id, models))
        cut_off = [who for who in self._left if any(id(model) in mine for model in who.models)]
        self._left = [who for who in self._left if who not in cut_off and who.models]
        edited = [run for run in runs if any(id(model) in mine for model in run.who.models) and _is_edited(run)]
        for run in edited:
            run.discard()
        for who in cut_off:
            with suppress(GradSyncError):  # from an engine that the edit has broken; the error below tells of the edit
                for engine in find(who.models):
                    engine.discard()
            discard(parameter for model in who.models for parameter in model.parameters())
        if cut_off or edited:
            what = "the optimizer was made anew"
            if edited:
                what += ", and parameters of the models are others than it knew"
            raise GradSyncError(
                f"The participants of {self._name} must stay the same within a window, but they changed in the middle "
                f"of one: {what}. That window is dropped. Make such a change between windows, where progress.index is "
                "0, or call flush() or reset() first."
            )


def _is_edited(run: Run) -> bool:
    """Whether the models have lost parameters since the open window was opened."""
    if run.window is None or not run.index or run.window.team.holds_inside:
        return False
    here = {id(parameter) for model in run.who.models for parameter in model.parameters()}
    return not run.window.team.in_models <= here
