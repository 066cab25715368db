"""Windows that were open when their optimizer died, because the user made a new optimizer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress

from torch import nn

from gradsync._errors import GradSyncError
from gradsync.engines import find
from gradsync.functional import Run, Who, discard


def drop_cut_off(name: str, models: Sequence[nn.Module], cut_off: list[Who], runs: Iterable[Run]) -> None:
    """Drop open windows of `models` whose optimizer was replaced, and raise if there are any.

    `cut_off` has the participants of windows that were open when their optimizer died. Those of `models`, and of models
    that are gone, are taken out. `runs` are the runs of optimizers that are alive. Such a run may have a window of the
    same models open (a GAN). It is an error only if the models have lost parameters since.
    """
    mine = set(map(id, models))
    edited = [run for run in runs if any(id(model) in mine for model in run.who.models) and _is_edited(run)]
    ended = [who for who in cut_off if any(id(model) in mine for model in who.models)]
    cut_off[:] = [who for who in cut_off if who not in ended and who.models]
    for run in edited:
        run.discard()
    for who in ended:
        with suppress(GradSyncError):  # from an engine that the edit has broken; the error below tells of the edit
            for engine in find(who.models):
                engine.discard()
        discard(parameter for model in who.models for parameter in model.parameters())
    if ended or edited:
        what = "the optimizer was made anew"
        if edited:
            what += ", and parameters of the models are others than it knew"
        raise GradSyncError(
            f"The participants of {name} must stay the same within a window, but they changed in the middle of one: "
            f"{what}. That window is dropped. Make such a change between windows, where progress.index is 0, or call "
            "flush() or reset() first."
        )


def _is_edited(run: Run) -> bool:
    """Whether the models have lost parameters since the open window was opened."""
    if run.window is None or not run.index or run.window.team.holds_inside:
        return False
    here = {id(parameter) for model in run.who.models for parameter in model.parameters()}
    return not run.window.team.in_models <= here
