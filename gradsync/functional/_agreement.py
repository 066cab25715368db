"""How ranks agree: seldom and in words through the store, once a window in numbers through a collective."""

from __future__ import annotations

import json
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from gradsync._errors import GradSyncError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_SLICE = timedelta(seconds=1)


def meet(group: dist.ProcessGroup | None, topic: str, saying: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Every rank says something on `topic` and hears what all have said, in the order of ranks.

    It goes through the group's store: it needs no process group of its own and no device, and a wait that ends in the
    group's time-out can name the ranks that did not come. Ranks that meet on different topics all get an error.
    """
    if group is None or group.size() == 1:
        return [dict(saying)]
    store, rank = group.get_group_store(), group.rank()
    number = store.add(f"gradsync/{rank}", 1)
    store.set(f"gradsync/{number}/{rank}", json.dumps([topic, dict(saying)]))
    keys = [f"gradsync/{number}/{other}" for other in range(group.size())]
    _wait(store, keys, group, topic)
    said = [json.loads(store.get(key)) for key in keys]
    if number > 1:
        store.delete_key(f"gradsync/{number - 1}/{rank}")  # all are here, so all have read the one before
    if any(other != topic for other, _ in said):
        raise GradSyncError(
            "All ranks must do the same thing at the same time, but they are at different places: "
            + "; ".join(f"rank {r} at {other}" for r, (other, _) in enumerate(said))
            + ". Look for a rank with another number of micro-batches; .over(...) allows for that."
        )
    return [words for _, words in said]


def insist(said: Sequence[Mapping[str, Any]], *, allowed: str = "") -> None:
    """Raise on every rank if the ranks said different things, and say which rank said what."""
    for key in said[0]:
        values = [words.get(key) for words in said]
        if any(value != values[0] for value in values):
            raise GradSyncError(
                f"All ranks must have the same {key}, but "
                + ", ".join(f"rank {rank} has {value}" for rank, value in enumerate(values))
                + f". {allowed or 'Make them equal: the ranks of a group train one model, window by window.'}"
            )


def total(group: dist.ProcessGroup | None, numbers: Sequence[float], like: torch.Tensor) -> list[float]:
    """`numbers` summed over the ranks, in float64. One small collective and one host synchronisation."""
    if group is None or group.size() == 1:
        return list(numbers)
    summed = torch.tensor(numbers, dtype=torch.float64, device=like.device)
    dist.all_reduce(summed, group=group)
    result: list[float] = summed.tolist()
    return result


def _wait(store: dist.Store, keys: Sequence[str], group: dist.ProcessGroup, topic: str) -> None:
    limit = time.monotonic() + _timeout(group)
    while True:
        try:
            store.wait(list(keys), _SLICE)
        except dist.DistNetworkError as error:
            raise GradSyncError(
                f"Every rank must come to {topic}, but the store that they meet at is gone: {error}. The rank that "
                "holds it, usually rank 0, has ended."
            ) from error
        except RuntimeError:  # a time-out: DistStoreError from a TCPStore, its parent from a FileStore
            if time.monotonic() < limit:
                continue
        else:
            return
        missing = [str(rank) for rank, key in enumerate(keys) if not store.check([key])]
        raise GradSyncError(
            f"Every rank must come to {topic}, but rank {', '.join(missing)} did not within the process group's "
            "time-out. It has ended, failed, or has another number of micro-batches; .over(...) allows for that."
        )


def _timeout(group: dist.ProcessGroup) -> float:
    # No public getter in torch 2.13.
    backend = group._get_backend(group._device_types[0])
    return float(backend.options._timeout.total_seconds())
