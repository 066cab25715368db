"""The communication hook with which gradients travel while the next window computes.

torch takes one communication hook for a DistributedDataParallel, for life. So outside of overlap this hook does what
DDP does without a hook, to the bit. Between `begin` and `end` it sends a copy of each bucket and returns the bucket
unchanged: the backward ends at once, and `parameter.grad` keeps this rank's own gradients.

Annotations are not postponed here, because DDP compares those of a hook with the classes themselves.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import GradBucket  # type: ignore[attr-defined]

from gradsync._errors import GradSyncError
from gradsync.engines import gradients_in, in_pairs
from gradsync.overlap.reused_memory import Memory


class _Place(NamedTuple):
    """Where a parameter's gradient is in its bucket."""

    parameter: nn.Parameter
    size: Sequence[int]
    stride: Sequence[int]
    offset: int


@dataclass(frozen=True, eq=False)
class _Sent:
    """The copy of one bucket, on its way."""

    work: dist.Work
    copy: torch.Tensor
    dtype: torch.dtype  # of the gradients; the copy may travel in a smaller one
    places: Sequence[_Place]

    def arrive(self, memory: Memory) -> torch.Tensor:
        """Wait, and return the mean in the gradients' own dtype."""
        self.work.wait()
        if self.copy.dtype == self.dtype:
            return self.copy
        return memory.take(self.copy, self.dtype).copy_(self.copy)

    def split(self, mean: torch.Tensor) -> Iterable[tuple[nn.Parameter, torch.Tensor]]:
        """The mean of the bucket by parameter, as views."""
        if mean.is_sparse:
            return [(self.places[0].parameter, mean)]
        kinds = [(place, in_pairs(mean, place.parameter)) for place in self.places]
        return [(place.parameter, kind.as_strided(place.size, place.stride, place.offset)) for place, kind in kinds]


@dataclass(frozen=True, eq=False)
class Flight:
    """The gradients of one window and one DDP, between their departure and their arrival."""

    sent: Sequence[_Sent]
    group: dist.ProcessGroup
    ledger: nn.Parameter | None
    flagged: Sequence[nn.Parameter]
    memory: Memory

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The parameters whose gradients travel, without the ledger."""
        every = (place.parameter for one in self.sent for place in one.places)
        return [parameter for parameter in every if parameter is not self.ledger]

    def arrive(self, *, all_used: bool = False) -> dict[nn.Parameter, torch.Tensor | None]:
        """Wait, and return the mean over the ranks by parameter; None for those that no rank has used.

        `all_used` says that this rank has used all of them itself; the ledger is then not read. The gradients are views
        of what travelled; when nobody holds them any more, another window uses their memory. Nothing is sent here, so
        one rank may call it alone.
        """
        means = [one.arrive(self.memory) for one in self.sent]
        arrived: dict[nn.Parameter, torch.Tensor | None] = {}
        for one, mean in zip(self.sent, means, strict=True):
            arrived.update(one.split(mean))
        if self.ledger is not None:
            flags = arrived.pop(self.ledger)
            assert flags is not None, "the ledger has travelled"
            for parameter, anywhere in () if all_used else zip(self.flagged, flags.tolist(), strict=True):
                if not anywhere:
                    arrived[parameter] = None
        self.memory.give(means)
        self.memory.give(one.copy for one, mean in zip(self.sent, means, strict=True) if one.copy is not mean)
        return arrived


@dataclass(eq=False)
class Travel:
    """The state of the hook on one DDP.

    `ledger` is a parameter whose gradient is a flag for each of `flagged`: zero if a rank has not used it. It has a
    bucket of its own, and always travels in its own dtype. `dtype` is the type in which gradients travel, None for
    their own. If it is narrower, they are cast to it, divided by the number of ranks, and added up in it.
    """

    group: dist.ProcessGroup | None = None  # None: the group of all ranks
    ledger: nn.Parameter | None = None
    flagged: Sequence[nn.Parameter] = ()
    dtype: torch.dtype | None = None
    memory: Memory = field(default_factory=Memory, repr=False)
    departing: list[_Sent] | None = field(default=None, repr=False)  # the buckets of a reduction that is under way

    @property
    def everybody(self) -> dist.ProcessGroup:
        """The group of the ranks."""
        group = dist.group.WORLD if self.group is None else self.group
        assert group is not None, "DDP needs one"
        return group

    def begin(self) -> None:
        """Let buckets travel from here until `end`. Call it right before the reducer is armed."""
        if self.departing is not None:
            raise GradSyncError(
                "One window's gradients depart at a time, but those of another are departing from the same model. Call "
                "Travel.end before Travel.begin."
            )
        self.departing = []

    def end(self) -> Flight:
        """Return what has departed since `begin`; the hook then averages again. Call it after the reduction."""
        departed, self.departing = self.departing, None
        self.memory.clear()
        return Flight(departed or (), self.everybody, self.ledger, self.flagged, self.memory)

    def __reduce__(self) -> tuple[Any, ...]:
        # A DDP is pickled with its hooks but without its group. A loaded one has the group of all ranks, and a new
        # reducer without a hook. What travels is not pickled.
        return Travel, (None, self.ledger, list(self.flagged), self.dtype)


def travel(state: Travel, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """The hook: average now, or send a copy."""
    group, buffer = state.everybody, bucket.buffer()
    dtype = _narrower(state, bucket, buffer)
    if state.departing is None:
        return _average(buffer, group, dtype)
    copy = _share(buffer, group, dtype, state.memory)
    work = dist.all_reduce(copy, group=group, async_op=True)
    assert work is not None, "it is asynchronous"
    state.departing.append(_Sent(work, copy, buffer.dtype, _places(bucket, buffer)))
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    done.set_result(buffer)
    return done


def _average(
    buffer: torch.Tensor, group: dist.ProcessGroup, dtype: torch.dtype | None
) -> torch.futures.Future[torch.Tensor]:
    """What DDP does without a hook, or, in a narrower dtype, with torch's own hook for that."""
    if dtype is not None:
        return _add_up(buffer.to(dtype).div_(group.size()), group).then(lambda sums: buffer.copy_(sums.value()[0]))
    if buffer.is_sparse:
        buffer.div_(group.size())
    else:
        buffer.mul_(1.0 / group.size())
    return _add_up(buffer, group).then(lambda sums: sums.value()[0])


def _add_up(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.futures.Future[list[torch.Tensor]]:
    work = dist.all_reduce(tensor, group=group, async_op=True)
    assert work is not None, "it is asynchronous"
    sums: torch.futures.Future[list[torch.Tensor]] = work.get_future()
    return sums


def _share(buffer: torch.Tensor, group: dist.ProcessGroup, dtype: torch.dtype | None, memory: Memory) -> torch.Tensor:
    """A copy of this rank's bucket, divided by the number of ranks, so that the sum over them is the mean."""
    if buffer.is_sparse:
        return buffer.clone().div_(group.size())
    copy = memory.take(buffer, dtype or buffer.dtype)
    if dtype is not None:
        return copy.copy_(buffer).div_(group.size())
    # DDP multiplies by the reciprocal, which is not the same to the bit as a division.
    return torch.mul(buffer, 1.0 / group.size(), out=copy)


def _narrower(state: Travel, bucket: GradBucket, buffer: torch.Tensor) -> torch.dtype | None:
    """The dtype to which the gradients are cast; None if they are not."""
    if state.dtype is None or buffer.is_sparse or buffer.dtype.itemsize <= state.dtype.itemsize:
        return None
    if state.ledger is not None and any(parameter is state.ledger for parameter in bucket.parameters()):
        return None
    return state.dtype


def _places(bucket: GradBucket, buffer: torch.Tensor) -> list[_Place]:
    if buffer.is_sparse:
        parameters: list[Any] = bucket.parameters()
        return [_Place(parameters[0], buffer.shape, (), 0)]
    return [
        _Place(p, view.shape, view.stride(), int(view.storage_offset() - in_pairs(buffer, p).storage_offset()))
        for p, view in gradients_in(bucket)
    ]
