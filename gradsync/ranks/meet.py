"""`meet`: ranks exchange words through the store. It is slow and rare; numbers go through `line`, once a window."""

from __future__ import annotations

import json
import time
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError  # TimeoutError itself only since Python 3.11
from threading import Thread
from typing import TYPE_CHECKING, Any, TypeVar

import torch.distributed as dist

from gradsync._errors import GradSyncError
from gradsync.ranks.group import timeout_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

T = TypeVar("T")

_GRACE = 2.0  # seconds beyond a group's time-out, for a store that does not answer


def meet(group: dist.ProcessGroup | None, topic: str, saying: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Exchange words on a `topic`; returns what each rank said, in the order of ranks. Collective.

    The words go through the group's store, which needs neither another process group nor a device. If the group's
    time-out passes, the error can name the ranks that did not come. Ranks that meet on different topics all raise.
    """
    if group is None or group.size() == 1:
        return [dict(saying)]
    said = at_the_store(group, topic, lambda: _exchange_words(group, topic, dict(saying)))
    if any(other != topic for other, _ in said):
        raise GradSyncError(
            "All ranks must do the same thing at the same time, but they are at different places: "
            + "; ".join(f"rank {r} at {other}" for r, (other, _) in enumerate(said))
            + ". Look for a rank that left its loop, or that has another number of micro-batches; .over(...) allows "
            "for different numbers, and a loop is left early on all ranks together."
        )
    return [words for _, words in said]


def meet_with_data(
    group: dist.ProcessGroup | None, twins: Sequence[dist.ProcessGroup], topic: str, saying: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """`meet`, and then compare the data of ranks that run a forward together; raises on every rank if it differs.

    `twins` are the tensor-parallel groups. Their ranks are in different data-parallel groups, and compare what was said
    there.
    """
    said = meet(group, topic, saying)
    what = "numbers of items"
    for others in twins:
        heard = meet(others, topic, {what: [one["items"] for one in said]})
        agreed([(dist.get_global_rank(others, rank), one[what]) for rank, one in enumerate(heard)], what, ONE_FORWARD)
    return said


_ONE_MODEL = "Make them equal: the ranks of a group train one model, window by window."
ONE_FORWARD = "Ranks of one tensor-parallel group run one forward: give them the same data."


def insist(said: Sequence[Mapping[str, Any]], keys: Iterable[str] | None = None) -> None:
    """Raise on every rank if the ranks said different things of these keys, or any; the error says who said what."""
    for key in said[0] if keys is None else keys:
        agreed([(rank, words.get(key)) for rank, words in enumerate(said)], key)


def agreed(values: Sequence[tuple[int, T]], what: str, advice: str = _ONE_MODEL) -> T | None:
    """The value that all these ranks have (None without ranks). Raises on every rank if the values differ."""
    if any(value != values[0][1] for _, value in values):
        raise GradSyncError(
            f"All ranks must have the same {what}, but "
            + ", ".join(f"rank {rank} has {value}" for rank, value in values)
            + f". {advice}"
        )
    return values[0][1] if values else None


def ranks_where(flags: Iterable[bool]) -> str:
    """The ranks whose flag is set, for an error: "1, 3"; empty if there are none."""
    return ", ".join(str(rank) for rank, flag in enumerate(flags) if flag)


def nothing_here(topic: str) -> None:
    """This rank has made no call and knows no models. Fine if that is so on every rank; else an error on all ranks.

    This rank says so in the default group's store, where ranks that wait for it in `meet` look. If there are groups of
    some of the ranks, the model may be on any of them, and this rank cannot know whom to wait for: then it raises at
    once.
    """
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return
    group = dist.group.WORLD
    assert group is not None, "initialised"
    if any(1 < one.size() < group.size() for one in dist.distributed_c10d._world.pg_map):
        at_the_store(group, topic, lambda: group.get_group_store().set(_left_empty(group.rank()), topic))
        where = f"when it came to {topic}, and in which of the process groups its models are is not known either"
        raise GradSyncError(_EMPTY.format(where=where, ranks=group.rank()))
    if not at_the_store(group, topic, lambda: _everybody_is_empty(group)):
        raise GradSyncError(_EMPTY.format(where=f"when it came to {topic}", ranks=group.rank()))


_EMPTY = (
    "Every rank needs an item where the models are not known before the first call, but rank {ranks} had none "
    "{where}. Name them: accumulating(..., model=..., optimizer=...), or give each rank an item."
)


def _left_empty(rank: int) -> str:
    """The key that says that a rank had no item and left with an error; deleted when it meets others again."""
    return f"gradsync/left empty/{rank}"


def at_the_store(group: dist.ProcessGroup, topic: str, talk: Callable[[], T]) -> T:
    """Call `talk`; returns what it returns, or raises soon after the group's time-out at the latest.

    `talk` runs in a thread: if a link is cut, no operation of a TCPStore ever returns, whatever its own time-out is
    (torch 2.13; its `wait` sends a cancellation and waits for the answer to that).
    """
    outcome: Future[T] = Future()

    def run() -> None:
        try:
            outcome.set_result(talk())
        except BaseException as error:  # noqa: BLE001 - it goes on in the caller's thread
            outcome.set_exception(error)

    Thread(target=run, name=f"gradsync: {topic}", daemon=True).start()
    try:
        return outcome.result(timeout_of(group) + _GRACE)
    except dist.DistNetworkError as error:
        raise GradSyncError(
            f"Every rank must come to {topic}, but the store that they meet at is gone: {error}. The process that "
            "holds it, torchrun's or else rank 0, has ended."
        ) from error
    except FutureTimeoutError as error:
        raise GradSyncError(
            f"Every rank must come to {topic}, but the store that they meet at does not answer within the process "
            "group's time-out. The way to the process that holds it, torchrun's or else rank 0, is cut, or it hangs."
        ) from error


def _exchange_words(group: dist.ProcessGroup, topic: str, saying: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    store: Any = group.get_group_store()
    rank = group.rank()
    _world_store().delete_key(_left_empty(dist.get_rank()))
    number = store.add(f"gradsync/{rank}", 1)
    store.set(f"gradsync/{number}/{rank}", json.dumps([topic, saying]))
    keys = [f"gradsync/{number}/{other}" for other in range(group.size())]
    wait_for(store, keys, group, topic)
    said = [json.loads(one) for one in (store.multi_get(keys) if store.has_extended_api() else map(store.get, keys))]
    if number > 1:
        store.delete_key(f"gradsync/{number - 1}/{rank}")  # all are here, so all have read the one before
    return said


def _everybody_is_empty(group: dist.ProcessGroup) -> bool:
    store, rank = group.get_group_store(), group.rank()
    mine = store.add(f"gradsync/empty/{rank}", 1)
    limit = time.monotonic() + timeout_of(group)
    while time.monotonic() < limit:
        everybody = all(store.add(f"gradsync/empty/{other}", 0) >= mine for other in range(group.size()))
        if (
            store.add(f"gradsync/needed/{rank}", 0) >= mine
        ):  # the rank that sets it does so before it counts itself as empty
            store.add(f"gradsync/{rank}", 1)  # the meeting that this rank missed
            return False
        if everybody:
            return True
        time.sleep(0.05)
    return False


def _world_store() -> Any:
    world = dist.group.WORLD
    assert world is not None, "initialised"
    return world.get_group_store()


def _refuse_empty(group: dist.ProcessGroup, missing: Sequence[int], topic: str) -> None:
    """Raise if a missing rank said that it has no item and knows no models, and tell that rank to raise."""
    world = dist.group.WORLD
    assert world is not None, "initialised"
    store = _world_store()
    missing = [dist.get_global_rank(group, rank) for rank in missing]
    left = [rank for rank in missing if store.check([_left_empty(rank)])]
    if left:
        raise GradSyncError(_EMPTY.format(where=f"when this one came to {topic}", ranks=", ".join(map(str, left))))
    before = store.add(f"gradsync/empty/{world.rank()}", 0)  # how often all ranks were empty, this rank included
    empty = [rank for rank in missing if store.add(f"gradsync/empty/{rank}", 0) > before]
    if empty:
        for rank in empty:
            store.set(f"gradsync/needed/{rank}", str(before + 1))
        store.add(f"gradsync/empty/{world.rank()}", 1)  # so that the ranks' counts stay equal, should they go on
        raise GradSyncError(_EMPTY.format(where=f"when this one came to {topic}", ranks=", ".join(map(str, empty))))


def wait_for(store: Any, keys: Sequence[str], group: dist.ProcessGroup, topic: str) -> None:
    """Return when all `keys` are set, one by each rank.

    It looks repeatedly, at growing intervals, because torch prints a warning for each `wait` that times out.
    """
    start, limit, looks_at_empty = time.monotonic(), timeout_of(group), 1.0
    while not store.check(list(keys)):
        waited = time.monotonic() - start
        over = waited > limit
        if over or waited > looks_at_empty:
            missing = [rank for rank, key in enumerate(keys) if not store.check([key])]
            _refuse_empty(group, missing, topic)
            looks_at_empty += 1.0
            if over and missing:
                raise GradSyncError(
                    f"Every rank must come to {topic}, but rank {', '.join(map(str, missing))} did not within the "
                    "process group's time-out. It ended, failed, left its loop early, or has another number of "
                    "micro-batches. Leave a loop on all ranks together, and let .over(...) hold what differs in number."
                )
        time.sleep(min(max(waited / 16, 5e-5), 0.2))
