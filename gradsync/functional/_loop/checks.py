"""Checks at the beginning of a loop, before any rank could wait for another forever."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from gradsync._errors import GradSyncError
from gradsync.engines import Engine
from gradsync.ranks.meet import agreed, ranks_where


def insist_on_windows(said: Sequence[Mapping[str, Mapping[str, Any]]]) -> None:
    """Raise on every rank if the settings of a run differ among the ranks that know it."""
    for name in dict.fromkeys(name for words in said for name in words):
        knowing = [(rank, words[name]) for rank, words in enumerate(said) if name in words]
        for key in knowing[0][1]:
            agreed([(rank, words[key]) for rank, words in knowing], key)


def refuse_join(name: str, engines: Iterable[Engine]) -> None:
    """Raise where torch's `Join` is around a loop: both would take the place of a rank that has run out."""
    if any(engine.joins for engine in engines):
        raise GradSyncError(
            f"Ranks with different numbers of items are taken care of by {name} itself, but torch's Join is around it, "
            "which would do the same a second time. Leave Join out."
        )


def check_repeats(can_repeat: Sequence[bool], name: str) -> None:
    """Raise if a rank may have to repeat a call and has made none."""
    cannot = ranks_where(not can for can in can_repeat)
    if cannot:
        raise GradSyncError(
            f"Every rank needs at least one item in {name} where a rank that has run out repeats its last one "
            f"(the engine's forward communicates, or this is sync_every), but rank {cannot} has none. Give each rank "
            "an item, or use accumulating, whose .over needs none on DDP."
        )


def check_lengths(lengths: Sequence[int | None], name: str) -> None:
    """Raise if the ranks' lengths may differ where SyncBatchNorm waits for all ranks."""
    if None in lengths or len(set(lengths)) > 1:
        told = ", ".join(f"rank {rank} has {'?' if n is None else n}" for rank, n in enumerate(lengths))
        raise GradSyncError(
            f"SyncBatchNorm waits for every rank in each forward, so that all need equally many items in {name}, but "
            f"{told}. Give each rank as many, in an iterable with a length."
        )


def insist_on_even_around(name: str, around: Sequence[str | None]) -> None:
    """Raise on every rank if a loop begins in the middle of another one, with different numbers of items."""
    uneven = next((other for other in around if other is not None), None)
    if uneven is not None:
        raise GradSyncError(
            f"Ranks may have different numbers of items in one loop at a time, but {name} began in the middle of "
            f"{uneven}, in which they do: a rank that has run out of {uneven} would come to {name} at another time "
            f"than the others. {_ONE_LOOP}"
        )


def refuse_to_rest(name: str, beside: Sequence[str]) -> None:
    """Raise where this rank has run out, and another loop goes on beside this one."""
    if beside:
        raise GradSyncError(
            f"Ranks may have different numbers of items in one loop at a time, but this rank has run out in {name}, "
            f"and others may not have, while {beside[0]} goes on beside it. {_ONE_LOOP}"
        )


_ONE_LOOP = (
    "Make one loop of both, sync_every([model, other], ...) or a.over(b.over(data)), or give each rank equally many "
    "items, in iterables with a length."
)
