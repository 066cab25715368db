"""What users do with gradients in `sync_every`: leave them where a window begins, or step an optimizer on them."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import nn

from gradsync._errors import GradSyncError
from gradsync._loss import PLAIN
from gradsync._marks import KEPT, LEFT, is_marked, mark
from gradsync._state import open_runs
from gradsync.functional._team.team import Team, made_from_gathered
from gradsync.functional._update.gradients import values_here
from gradsync.functional._window.closing import Closing
from gradsync.functional._window.place import Place
from gradsync.functional._window.run import Run


def insist_on_none_left(team: Team, window: int) -> list[torch.Tensor]:
    """Raise where a window begins with gradients of an update or of a loop that was left; window 0, with any of others.

    Returns, for each gradient, whether any of its values is not zero.
    """
    gradients = [parameter.grad for parameter in team.parameters if parameter.grad is not None]
    there = [values_here(gradient).any() for gradient in gradients]
    is_left = [is_marked(gradient, LEFT) for gradient in gradients]
    is_kept = [window > 0 or is_marked(gradient, KEPT) for gradient in gradients]
    left = [one for one, to_clear, kept in zip(there, is_left, is_kept, strict=True) if to_clear or not kept]
    if any(left):  # their values count, because .data.zero_() makes no new version
        raise GradSyncError(
            f"A window must begin without gradients, but {sum(map(bool, left))} parameters still have those of an "
            "update, of a backward of your own, or of a loop over sync_every that was left in the middle of a window. "
            "Call optimizer.zero_grad() after each optimizer.step(), and behind such a backward or loop."
        )
    return there


def insist_on_none_inside(team: Team) -> None:
    """Raise where a window begins with gradients that an engine keeps where no `zero_grad` reaches them."""
    inside = team.num_inside() if team.holds_inside else 0
    if inside:
        raise GradSyncError(
            f"A window must begin without gradients, but the engine holds those of {inside} parameters, of a loop that "
            "was left in the middle of a window, or of backwards of your own. zero_grad() does not reach them: call "
            "gradsync.sync_gradients(model), and optimizer.zero_grad() behind it to drop them."
        )


def check_step(
    run: Run, place: Place, closing: Closing | None, stepped: Sequence[nn.Parameter], reached: Collection[int]
) -> None:
    """An optimizer is about to step: an error on a held micro-step, and with gradients that are not exact.

    `reached` has what a plain backward that synchronises has come to in this turn.
    """
    team = run.fitting_team()
    if team.holds_inside and not team.ids.issuperset(map(id, stepped)):
        gathered = set(map(id, team.leaves)) - team.ids
        if num_stale := len(gathered.intersection(map(id, stepped))):
            raise made_from_gathered(run.name, num_stale)
    if team.ids.isdisjoint(map(id, stepped)):
        return
    if closing is None:
        run.insist_on_same(place)  # what was unfrozen in the body has had no backward of the window's
        if place.last and reached:
            raise GradSyncError(
                "A plain backward on the last micro-step of a window must tell when it ends, because the window "
                f"synchronises there, but that of window {place.window} did not: torch passes over such callbacks "
                "under compiled autograd. Call step.backward(loss) in each micro-step."
            )
        where = "before the backward of the last one" if place.last else "on one that is held"
        raise GradSyncError(
            "An optimizer may step on the last micro-step of a window only, behind its backward, where the gradients "
            f"are synchronised, but optimizer.step() came {where}. Write behind the backward: if step.last: "
            "optimizer.step(); optimizer.zero_grad()."
        )
    others = [one for one in stepped if id(one) not in team.ids and one.grad is not None]
    if others:  # a loop zipped with this one has parameters too; it is not asked where there is no need
        known = team.ids.union(*(other.window.team.ids for other in open_runs()))
        others = [one for one in others if id(one) not in known]
    if others and (team.num_ranks > 1 or closing.factor not in {None, 1.0}):
        raise GradSyncError(
            f"An optimizer must step parameters of the models of sync_every only, which are synchronised and "
            f"normalised together, but it steps {len(others)} others that have a gradient, of shape "
            f"{', '.join(str(list(one.shape)) for one in others[:3])}. Pass all models: sync_every([model, other], "
            "...). Put a parameter of no module into one: nn.ParameterList([parameter])."
        )
    if run.open_window.kind != PLAIN:
        mark(stepped, LEFT)
