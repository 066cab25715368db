"""How the ranks of a loop meet at its first call: what would make one wait for another forever is found here."""

from __future__ import annotations

from gradsync._errors import GradSyncError
from gradsync._frames import is_running
from gradsync._state import LOOPS
from gradsync.functional._loop.knowledge import LoopKnowledge
from gradsync.functional._window.run import Run
from gradsync.functional._window.share import NOBODY, Share
from gradsync.ranks.meet import agreed, meet_with_data, no_item_here, ranks_where


def meet_at_first_call(loop: LoopKnowledge, run: Run) -> None:
    """The first call of a run in the loop begins."""
    if not loop.called:
        _meet(loop, run)
    else:
        if run.team is None:
            loop.announce(run)
        loop.called.append(run)
    keys = [one.key for one in loop.known]
    if len(set(keys)) < len(keys):
        raise GradSyncError(
            f"Each run that is called in {loop.name} needs a key of its own, the same on all ranks, but the keys "
            f"are {', '.join(map(str, keys))}. Pass key= to functional.Run: 0, 1, ..."
        )


def meet_without_call(loop: LoopKnowledge) -> None:
    """This rank's data has ended without a call: the other ranks may have more."""
    runs = loop.known
    if runs:
        _meet(loop, next((run for run in runs if run.window is not None), runs[0]))
    else:
        no_item_here(f"the data of {loop.name}")


def beside(loop: LoopKnowledge) -> list[LoopKnowledge]:
    """The other loops of this thread that are under way."""
    return [one for one in LOOPS if one is not loop and is_running(one.driver)]


def one_loop(what: str) -> GradSyncError:
    """The error for two loops at a time, where ranks may have different numbers of items."""
    return GradSyncError(
        f"Ranks may have different numbers of items in one loop at a time, but {what}. Make one loop of both, "
        "sync_every([model, other], ...) or a.over(b.over(data)), or give each rank equally many items, in iterables "
        "with a length."
    )


def _meet(loop: LoopKnowledge, run: Run) -> None:
    """Compare settings, of each run on the ranks that know it, and hear who has items. Errors come on every rank."""
    name, data, team = loop.name, loop.data, run.fitting_team()
    loop.called.append(run)
    if team.is_alone:
        return
    if any(engine.joins for engine in team.engines):
        raise GradSyncError(
            f"{name} itself takes care of ranks with different numbers of items, but torch's Join is around it, and "
            "would do so again. Leave Join out."
        )
    share = Share(
        left=data.left(run) + (not data.has_ended),
        once=float(loop.foresees(run)),
        open=float(run.key) if run.index else NOBODY,
    )
    uneven = (one.name for one in beside(loop) if len({*one.lengths} - {None}) > 1)
    saying = {
        "windows": {str(one.key): one.in_words() for one in loop.known},
        "items": data.length,
        "share": share.row(),
        "can repeat": not data.has_ended or run.can_repeat,
        "around": next(uneven, None),
    }
    said = meet_with_data(team.group, team.twins, f"the data of {name}", saying)
    windows = [one["windows"] for one in said]
    for key in dict.fromkeys(key for known in windows for key in known):
        knowing = [(rank, known[key]) for rank, known in enumerate(windows) if key in known]
        for setting in knowing[0][1]:
            agreed([(rank, words[setting]) for rank, words in knowing], setting)
    around = next((one["around"] for one in said if one["around"] is not None), None)
    if around is not None:
        raise one_loop(
            f"{name} began inside {around}, where they differ: a rank that has run out of {around} would come to "
            f"{name} at another time than the others"
        )
    loop.lengths = [one["items"] for one in said]
    loop.shares = [Share.of_row(one["share"]) for one in said]
    anything = any(share.left or share.open != NOBODY for share in loop.shares)
    owes = any(engine.owes_first for engine in team.engines)  # all ranks must run its very first micro-batch
    if anything and (team.forward_communicates or owes or run.terms.repeats == "always"):
        cannot = ranks_where(not one["can repeat"] for one in said)
        why = "its forward waits for all ranks" if team.forward_communicates else "as sync_every always does"
        if cannot:
            raise GradSyncError(
                f"Every rank needs at least one item in {name} where a rank that has run out repeats its last one "
                f"({'a static graph begins on all ranks together' if owes else why}), but rank {cannot} has none. Give "
                "each rank an item. Behind a bare model, .over of accumulating needs none."
            )
    if team.has_sync_batchnorm and team.num_ranks > 1 and not loop.is_even:
        told = ", ".join(f"rank {rank} has {'?' if n is None else n}" for rank, n in enumerate(loop.lengths))
        raise GradSyncError(
            f"SyncBatchNorm waits for every rank in each forward, so that all need equally many items in {name}, but "
            f"{told}. Give each rank as many, in an iterable with a length."
        )
