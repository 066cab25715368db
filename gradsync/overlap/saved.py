"""Saves what an optimizer's step may change, and puts it back to the bit.

Tensors are copied, and copied back in place: they stay the same objects, on which a CUDA graph depends. The containers
in `optimizer.state` get back what they held, so that what a step has created is gone: with dampening, a momentum of
zeros differs from no momentum. Of `param_groups`, which have optimizers' counters and users' learning rates, put back
only what the step changed, unless somebody has changed it since.

A picture is a snapshot of a value, from which the value is restored.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer

_PLAIN = (int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
_ABSENT: Any = object()


class _Held(NamedTuple):
    """A dict, list or tuple, and pictures of what it holds."""

    owner: Any
    items: Any


class _Reading(NamedTuple):
    """A small tensor, how often it had been written to, and what it held."""

    tensor: torch.Tensor
    version: int
    value: torch.Tensor


class _Changed(NamedTuple):
    """A value of a parameter group that a step has changed: pictures from before and from after it, or `_ABSENT`."""

    group: dict[str, Any]
    key: str
    before: Any
    after: Any


@dataclass(frozen=True, eq=False)
class Copies:
    """Tensors, and copies of what they held."""

    tensors: Sequence[torch.Tensor]
    copies: Sequence[torch.Tensor]

    @classmethod
    def of(cls, tensors: Iterable[torch.Tensor], spare: Iterable[torch.Tensor] = ()) -> Copies:
        """Copies of `tensors`, in the memory of `spare` ones where these are alike."""
        every = list({id(tensor): tensor for tensor in tensors}.values())
        alike: defaultdict[object, list[torch.Tensor]] = defaultdict(list)
        for one in spare:
            alike[_likeness(one)].append(one)
        with torch.no_grad():
            copies = [alike[_likeness(one)].pop() if alike[_likeness(one)] else torch.empty_like(one) for one in every]
        _copy(every, copies)
        return cls(every, copies)

    def put_back(self) -> None:
        """Write into the tensors what they held."""
        _copy(self.copies, self.tensors)


@dataclass(frozen=True, eq=False)
class Saved:
    """What the steps of some optimizers may change, as it was before them."""

    copies: Copies  # of the parameters, and of the tensors in the state
    states: Sequence[_Held]
    groups: Sequence[_Held]
    changed: Sequence[_Changed] = ()

    @classmethod
    def of(cls, optimizers: Sequence[Optimizer], spare: Saved | None = None) -> Saved:
        """Save. The memory of `spare`, which is not needed any more, is used again."""
        tensors: list[torch.Tensor] = []
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                tensors += [parameter for parameter in group["params"] if parameter.requires_grad]

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            tensors.append(tensor)
            return tensor

        states = [_picture(optimizer.state, keep) for optimizer in optimizers]
        groups = [
            _Held(group, {key: _picture(value, _read) for key, value in group.items() if key != "params"})
            for optimizer in optimizers
            for group in optimizer.param_groups
        ]
        return cls(Copies.of(tensors, () if spare is None else spare.copies.copies), states, groups)

    def after_step(self) -> Saved:
        """The same, with what the steps have changed in the parameter groups. Call it after them."""
        changed = [
            _Changed(group, key, was, _picture(now, _read) if now is not _ABSENT else now)
            for group, before in self.groups
            for key in {**before, **group}
            if key != "params" and not _same(was := before.get(key, _ABSENT), now := group.get(key, _ABSENT))
        ]
        return replace(self, changed=changed)

    def emptied(self) -> Saved:
        """Only the memory, for another: without the tensors and containers that were saved."""
        return Saved(Copies((), self.copies.copies), (), ())

    def put_back(self) -> None:
        """Undo the steps. May be called again."""
        self.copies.put_back()
        for state in self.states:
            _restore(state)
        for group, key, before, after in self.changed:
            if not _same(after, group.get(key, _ABSENT)):
                continue  # somebody has set it since
            if before is _ABSENT:
                del group[key]
            else:
                group[key] = _restore(before)


def _picture(value: Any, keep: Callable[[torch.Tensor], Any]) -> Any:
    """A picture of `value`, for `_restore`; what stands for a tensor in it is the result of `keep`."""
    if isinstance(value, torch.Tensor):
        return keep(value)
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, dict):
        return _Held(value, {key: _picture(item, keep) for key, item in value.items()})
    if isinstance(value, list | tuple):
        return _Held(value, [_picture(item, keep) for item in value])
    return deepcopy(value)


def _restore(picture: Any) -> Any:
    """Put back what a picture shows, into the same objects, and return it."""
    if isinstance(picture, _Reading):
        if picture.tensor._version != picture.version:
            with torch.no_grad():
                picture.tensor.copy_(picture.value)
        return picture.tensor
    if not isinstance(picture, _Held):
        return picture
    owner, items = picture
    if isinstance(owner, dict):
        held = {key: _restore(item) for key, item in items.items()}
        owner.clear()
        owner.update(held)
    elif isinstance(owner, list):
        owner[:] = [_restore(item) for item in items]
    else:
        for item in items:
            _restore(item)
    return owner


def _same(picture: Any, now: Any) -> bool:
    """Whether a value of a parameter group is what it was. Reads no tensors, which would wait for a GPU."""
    if isinstance(picture, _Reading):
        return now is picture.tensor and now._version == picture.version
    if isinstance(picture, _Held):
        if now is not picture.owner and not type(now) is type(picture.owner) is tuple:
            return False
        if isinstance(now, dict):
            return now.keys() == picture.items.keys() and all(_same(picture.items[key], now[key]) for key in now)
        return len(now) == len(picture.items) and all(map(_same, picture.items, now))
    return now is picture or (type(now) is type(picture) and bool(now == picture))


def _read(tensor: torch.Tensor) -> _Reading:
    return _Reading(tensor, tensor._version, tensor.detach().clone())


def _copy(sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> None:
    """Copy, in calls that each take tensors of one device and dtype."""
    alike: defaultdict[object, tuple[list[torch.Tensor], list[torch.Tensor]]] = defaultdict(lambda: ([], []))
    for source, target in zip(sources, targets, strict=True):
        some = alike[source.device, source.dtype]
        some[0].append(source)
        some[1].append(target)
    with torch.no_grad():
        for some_sources, some_targets in alike.values():
            torch._foreach_copy_(some_targets, some_sources)


def _likeness(tensor: torch.Tensor) -> object:
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device
