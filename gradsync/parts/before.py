"""Undoes what a failed attempt changed beside gradients: arguments, random state and buffers."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, MutableMapping, MutableSequence, Sequence
from typing import Any, TypeAlias

import torch
from torch import nn

from gradsync._errors import GradSyncError

Seen: TypeAlias = Sequence[tuple[torch.Tensor | None, int]]  # buffers and their versions

# Long lists of tokens or names are full of these, and they hold no tensor.
_PLAIN = frozenset({int, float, str, bytes, bool, type(None)})


class Before:
    """The arguments, and the random state and the buffers of some models, as they were before an attempt."""

    __slots__ = ("_copies", "_cpu", "_devices", "_handed", "_seen", "_state")

    def __init__(self, state: ForwardState, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self._handed = Handed(args, kwargs)
        self._cpu = torch.default_generator.get_state()
        self._devices = [(one, torch.get_device_module(one).get_rng_state(one)) for one in state.devices]
        self._state = state
        self._seen, self._copies = state.see()

    def keep(self) -> None:
        """The attempt succeeded: what it changed stays."""
        self._state.learn(self._seen)

    def put_back(self) -> None:
        """The attempt failed: undo what it changed."""
        torch.default_generator.set_state(self._cpu)
        for device, state in self._devices:
            torch.get_device_module(device).set_rng_state(state, device)
        self._state.put_back(self._seen, self._copies)
        self._handed.put_back()


class ForwardState:
    """What forwards of some models may change: their buffers, and the random state of their devices.

    It does not keep the models alive. Forwards change few buffers, such as a counter or the vector of a spectral norm,
    and the first attempt shows which. Before that attempt all buffers are copied, later only those. The others are
    watched by object and version.
    """

    def __init__(self, models: Sequence[nn.Module] = ()) -> None:
        modules = {id(module): module for model in models for module in model.modules()}
        self._places = [
            (weakref.ref(module), name)
            for module in modules.values()
            for name in module._buffers  # also those that are None, which a first forward may replace
        ]
        self._moving: set[int] | None = None  # indices in places; None until an attempt has shown them
        self.devices: Sequence[torch.device] = ()  # beside the CPU
        if torch.accelerator.is_available():
            devices = {parameter.device for model in models for parameter in model.parameters()}
            self.devices = sorted((one for one in devices if one.type != "cpu"), key=str)

    def like(self, other: ForwardState) -> ForwardState:
        """This state, with what `other` has learnt if it has the same buffers."""
        if self._places == other._places:
            self._moving = other._moving
        return self

    def see(self) -> tuple[Seen, dict[int, torch.Tensor]]:
        """The buffers as they are now, and copies of those that an attempt may change."""
        seen = [(one, version_of(one)) for one in map(self._at, range(len(self._places)))]
        moving = range(len(seen)) if self._moving is None else self._moving
        return seen, {index: one.clone() for index in moving if (one := seen[index][0]) is not None}

    def learn(self, seen: Seen) -> None:
        """An attempt has succeeded: remember which buffers it changed."""
        self._moving = (self._moving or set()) | set(self._changed(seen))

    def put_back(self, seen: Seen, copies: dict[int, torch.Tensor]) -> None:
        """An attempt has failed: undo what it changed."""
        for index in self._changed(seen):
            ref, name = self._places[index]
            module = ref()
            if module is None:
                continue
            before, version = seen[index]
            module._buffers[name] = before  # another object may have been put in its place
            if version_of(before) == version:
                continue
            if before is None or index not in copies:
                raise GradSyncError(
                    f"A call that ran out of memory can go on in parts only if what it changed is put back, but it "
                    f"changed the buffer {name!r} of a {type(module).__name__}, which no call had changed before and "
                    "of which there is therefore no copy. Change it in the first call, or outside the forward."
                )
            with torch.no_grad():
                before.copy_(copies[index])

    def _changed(self, seen: Seen) -> list[int]:
        return [
            index
            for index, (before, version) in enumerate(seen)
            if self._at(index) is not before or version_of(before) != version
        ]

    def _at(self, index: int) -> torch.Tensor | None:
        ref, name = self._places[index]
        module = ref()
        return None if module is None else module._buffers.get(name)


class Handed:
    """The tensors among some arguments, with their versions, and what their lists and dicts hold.

    A body may write to them before it fails.
    """

    __slots__ = ("_containers", "_tensors")

    def __init__(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self._tensors: list[tuple[torch.Tensor, int]] = []
        self._containers: list[tuple[Any, Any]] = []  # with copies
        for one in (*args, *kwargs.values()):
            self._note(one)

    def put_back(self) -> None:
        """Restore lists and dicts; raise if a tensor was written to, because there is no copy of it."""
        for container, held in self._containers:
            if isinstance(container, MutableSequence):
                container[:] = held
            elif [*container] != [*held] or any(container[key] is not one for key, one in held.items()):
                container.clear()  # the order of its keys comes back, too
                container.update(held)
        for tensor, before in self._tensors:
            if version_of(tensor) != before:
                raise GradSyncError(
                    "A call that ran out of memory can go on in parts only if its arguments are as they were, but it "
                    f"wrote to one of them in place, a tensor of shape {tuple(tensor.shape)}. Write to a copy: "
                    "x = x.div(255), not x.div_(255)."
                )

    def _note(self, one: Any) -> None:
        if type(one) in _PLAIN:
            return
        if isinstance(one, torch.Tensor):
            self._tensors.append((one, version_of(one)))
        elif isinstance(one, list | tuple):
            if isinstance(one, list):
                self._containers.append((one, list(one)))
            for inner in one:
                self._note(inner)
        elif isinstance(one, Mapping):
            if isinstance(one, MutableMapping):
                self._containers.append((one, dict(one)))
            for inner in one.values():
                self._note(inner)


def version_of(tensor: torch.Tensor | None) -> int:
    """How often a tensor was written to; -1 if there is none, or if torch does not count (inference tensors)."""
    return -1 if tensor is None or tensor.is_inference() else tensor._version
