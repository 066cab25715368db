"""Windows that an edit has cut off in their middle: the models go on with an optimizer that was made anew."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from gradsync._errors import GradSyncError
from gradsync.engines import find
from gradsync.functional import Run, Who, discard

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch import nn


class Unfinished:
    """Whose windows were open as their optimizer died, by instance; their models are held weakly."""

    def __init__(self, name: str) -> None:
        """`name` is the function's."""
        self._name = name
        self._left: list[tuple[int | None, Who]] = []

    def note(self, key: int | None, run: Run) -> None:
        """An optimizer has died, and these windows with it."""
        if run.index:
            self._left.append((key, run.who))

    def forget(self, key: int | None) -> None:
        """What was open is given up on purpose, or the instance is gone."""
        self._left = [one for one in self._left if one[0] != key]

    def check(self, key: int | None, models: Sequence[nn.Module], runs: Iterable[Run]) -> None:
        """Raise where `models` come with other optimizers in the middle of a window of theirs.

        `runs` are those of the optimizers that are alive. One of them may be in the middle of a window, as in a GAN,
        but then its models still have all the parameters that this began with.
        """
        mine = set(map(id, models))
        cut_off = [who for own, who in self._left if own == key and any(id(model) in mine for model in who.models)]
        self._left = [(own, who) for own, who in self._left if who not in cut_off and who.models]
        edited = [run for run in runs if any(id(model) in mine for model in run.who.models) and _is_edited(run)]
        for run in edited:
            run.discard()
        for who in cut_off:
            with suppress(GradSyncError):  # of an engine that the edit has spoiled: ours tells of the edit
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
    """Whether parameters that were in the models as its open window began are no longer there."""
    if run.window is None or not run.index or any(engine.holds_inside for engine in run.window.team.engines):
        return False
    here = {id(parameter) for model in run.who.models for parameter in model.parameters()}
    return not run.window.team.in_models <= here
