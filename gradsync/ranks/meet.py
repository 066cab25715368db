"""`meet`: ranks exchange words through the store. It is slow and rare; numbers go through `tables`."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError  # TimeoutError itself only since Python 3.11
from threading import Thread
from typing import Any, TypeAlias, TypeVar

import torch.distributed as dist

from gradsync._errors import GradSyncError
from gradsync.ranks.group import several_ranks, timeout_of

_Said: TypeAlias = list[tuple[str, Any]]
"""By rank: the topic that it came to, and its words; None in place of words from a rank that has nothing."""

T = TypeVar("T")

_GRACE = 2.0  # seconds beyond a group's time-out, for a store that does not answer


def meet(group: dist.ProcessGroup | None, topic: str, saying: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Exchange words on a `topic`; returns what each rank said, in the order of ranks. Collective.

    The words go through the group's store, which needs neither another process group nor a device. If the group's
    time-out passes, the error can name the ranks that did not come. Ranks that meet on different topics all raise.
    """
    if group is None or group.size() == 1:
        return [dict(saying)]
    said = _at_the_store(group, topic, lambda: _exchange_words(group, topic, dict(saying)))
    _insist_on_items(_empty(said))
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

    `twins` are the tensor-parallel groups. Where their ranks are in different data-parallel groups, they compare what
    was said there.
    """
    said = meet(group, topic, saying)
    for others in twins:
        heard = meet(others, topic, {"in the group": [one["items"] for one in said], "own": saying["items"]})
        for what in heard[0]:
            numbers = [(dist.get_global_rank(others, rank), one[what]) for rank, one in enumerate(heard)]
            agreed(numbers, "numbers of items", ONE_FORWARD)
    return said


_ONE_MODEL = "Make them equal: the ranks of a group train one model, window by window."
ONE_FORWARD = "Ranks of one tensor-parallel group run one forward: give them the same data."


def insist(said: Sequence[Mapping[str, Any]], keys: Iterable[str] | None = None) -> None:
    """Raise on every rank if the ranks said different things of these keys, or, without `keys`, of any."""
    for key in said[0] if keys is None else keys:
        agreed([(rank, words.get(key)) for rank, words in enumerate(said)], key)


def agreed(values: Sequence[tuple[int, object]], what: str, advice: str = _ONE_MODEL) -> None:
    """Raise on every rank if these ranks have different values."""
    if any(value != values[0][1] for _, value in values):
        raise GradSyncError(
            f"All ranks must have the same {what}, but "
            + ", ".join(f"rank {rank} has {value}" for rank, value in values)
            + f". {advice}"
        )


def ranks_where(flags: Iterable[bool]) -> str:
    """The ranks whose flag is set, for an error: "1, 3"; empty if there are none."""
    return ", ".join(str(rank) for rank, flag in enumerate(flags) if flag)


def no_item_here(topic: str) -> None:
    """This rank has made no call and knows no models. Fine if that is so on every rank; else an error on all ranks.

    This rank does not know its model's group, so it meets the others in the default group; ranks that wait in another
    group for this one look there. If smaller groups exist, it cannot know whom to wait for, and raises at once.
    """
    if not several_ranks():
        return
    world = _world()
    if any(1 < one.size() < world.size() for one in dist.distributed_c10d._world.pg_map):
        where = f"{topic}, and in which of the process groups its models are is not known either"
        _at_the_store(world, topic, lambda: world.get_group_store().set(_left_empty(world.rank()), where))
        _insist_on_items({world.rank(): where})
    empty = _empty(_at_the_store(world, topic, lambda: _exchange_words(world, topic, None)))
    if len(empty) < world.size():
        _insist_on_items(empty)


def _empty(said: _Said) -> dict[int, str]:
    """The ranks that came without words, and to which topic: they have no item, and know no models."""
    return {rank: topic for rank, (topic, words) in enumerate(said) if words is None}


def _insist_on_items(empty: Mapping[int, str]) -> None:
    """Raise on every rank if these ranks had nothing when they came to these topics."""
    if empty:
        raise GradSyncError(
            "Every rank needs an item where the models are not known before the first call, but rank "
            f"{', '.join(map(str, empty))} had none when it came to {next(iter(empty.values()))}. Name them: "
            "accumulating(..., model=..., optimizer=...), or give each rank an item."
        )


def _left_empty(rank: int) -> str:
    """The key where a rank without an item writes at which topic it raised. Its next meeting empties it."""
    return f"gradsync/left empty/{rank}"


def _world() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None, "initialised"
    return dist.group.WORLD


def _at_the_store(group: dist.ProcessGroup, topic: str, talk: Callable[[], T]) -> T:
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
    except (dist.DistNetworkError, FutureTimeoutError) as error:
        is_gone = isinstance(error, dist.DistNetworkError)
        why = f"is gone: {error}" if is_gone else "does not answer within the process group's time-out"
        raise GradSyncError(
            f"Every rank must come to {topic}, but the store that they meet at {why}. The process that holds it, "
            "torchrun's or else rank 0, has ended or hangs, or the way to it is cut."
        ) from error


def _exchange_words(group: dist.ProcessGroup, topic: str, saying: dict[str, Any] | None) -> _Said:
    store: Any = group.get_group_store()
    rank = group.rank()
    _world().get_group_store().set(_left_empty(dist.get_rank()), "")
    number = store.add(f"gradsync/{rank}", 1)
    keys = [f"gradsync/{number}/{other}" for other in range(group.size())]
    store.set(keys[rank], json.dumps([topic, saying]))
    _wait_for(store, keys, group, topic)
    said = [json.loads(one) for one in (store.multi_get(keys) if store.has_extended_api() else map(store.get, keys))]
    if number > 1:
        store.delete_key(f"gradsync/{number - 1}/{rank}")  # all are here, so all have read the one before
    return said


def _wait_for(store: Any, keys: Sequence[str], group: dist.ProcessGroup, topic: str) -> None:
    """Return when all `keys` are set, one by each rank.

    It looks repeatedly, at growing intervals, because torch prints a warning for each `wait` that times out.
    """
    start, limit, looks_at_empty = time.monotonic(), timeout_of(group), 1.0
    while not store.check(list(keys)):
        waited = time.monotonic() - start
        over = waited > limit
        if over or waited > looks_at_empty:
            missing = [rank for rank, key in enumerate(keys) if not store.check([key])]
            try:
                _look_for_empty(group, missing, topic)
            except GradSyncError:
                store.add(f"gradsync/{group.rank()}", -1)  # the missing ranks have not counted this meeting
                store.delete_key(keys[group.rank()])
                raise
            looks_at_empty += 1.0
            if over and missing:
                raise GradSyncError(
                    f"Every rank must come to {topic}, but rank {', '.join(map(str, missing))} did not within the "
                    "process group's time-out. It ended, failed, left its loop early, or has another number of "
                    "micro-batches. Leave a loop on all ranks together, and let .over(...) hold what differs in number."
                )
        time.sleep(min(max(waited / 16, 5e-5), 0.2))


def _look_for_empty(group: dist.ProcessGroup, missing: Sequence[int], topic: str) -> None:
    """Raise if a missing rank has no item and knows no models: it has left, or waits in the default group."""
    world = _world()
    store: Any = world.get_group_store()
    missing = [dist.get_global_rank(group, rank) for rank in missing]
    left = {rank: store.get(key).decode() for rank in missing if store.check([key := _left_empty(rank)])}
    _insist_on_items({rank: where for rank, where in left.items() if where})
    next_there = store.add(f"gradsync/{world.rank()}", 0) + 1
    keys = [key for rank in missing if store.check([key := f"gradsync/{next_there}/{rank}"])]
    if any(json.loads(store.get(key))[1] is None for key in keys):
        _insist_on_items(_empty(_exchange_words(world, topic, {})))  # so that it hears of this one
