"""Records the arguments of an attempt as they were handed in: a body may write to them before it fails."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, MutableSequence
from typing import Any

import torch

from gradsync._errors import GradSyncError

# Long lists of tokens or names are full of these, and they hold no tensor.
_PLAIN = frozenset({int, float, str, bytes, bool, type(None)})


class Handed:
    """The tensors among some arguments, with their versions, and what their lists and dicts hold."""

    __slots__ = ("_containers", "_tensors")

    def __init__(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self._tensors: list[tuple[torch.Tensor, int]] = []
        self._containers: list[tuple[Any, Any]] = []  # with copies
        for one in args:
            self._note(one)
        for one in kwargs.values():
            self._note(one)

    def put_back(self) -> None:
        """Restore lists and dicts; raise if a tensor was written to, because there is no copy of it."""
        for container, held in self._containers:
            if isinstance(container, MutableSequence):
                container[:] = held
            else:
                for key in [key for key in container if key not in held]:
                    del container[key]
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
            if isinstance(one, list) and one:
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
