"""Finds the parameters that a failed backward has reached, almost without hooks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeAlias

import torch

# What a gradient is, without keeping it alive: its id, its version, whether it is a view, and whether it is sparse (a
# dense one in the place of a sparse one may get the same id).
_State: TypeAlias = tuple[int, int, bool, bool]


class Arrived:
    """The gradients before a backward, to be compared with those after it has failed.

    A backward adds a parameter's whole gradient at once, and `grad` is then another object, or a newer version of the
    same. The old objects are not kept: if a reducer replaced them, they would stay in memory, in the backward that
    lacks memory. Gradients that are views (in a bucket) share one version, so hooks watch these.
    """

    __slots__ = ("_before", "_handles", "_parameters", "_told")

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        self._parameters = parameters
        self._before = [None if (gradient := parameter.grad) is None else _state(gradient) for parameter in parameters]
        self._told: set[int] = set()
        self._handles = [
            parameter.register_post_accumulate_grad_hook(self._tell)
            for parameter, before in zip(parameters, self._before, strict=True)
            if before is not None and before[2] and parameter.requires_grad
        ]

    def end(self) -> None:
        """The backward has ended, well or not."""
        for handle in self._handles:
            handle.remove()

    def missing(self) -> list[torch.Tensor]:
        """The parameters that need a gradient and have got nothing since."""
        _wait_for_threads({parameter.device for parameter in self._parameters})
        pairs = zip(self._parameters, self._before, strict=True)
        return [one for one, before in pairs if one.requires_grad and not self._has_got(one, before)]

    def _has_got(self, parameter: torch.Tensor, before: _State | None) -> bool:
        gradient = parameter.grad
        if gradient is None or before is None:
            return gradient is not None
        if before[2]:
            return id(parameter) in self._told
        return _state(gradient) != before

    def _tell(self, parameter: torch.Tensor) -> None:
        self._told.add(id(parameter))


def _state(gradient: torch.Tensor) -> _State:
    return id(gradient), gradient._version, gradient._is_view(), gradient.is_sparse


def _wait_for_threads(devices: Iterable[torch.device]) -> None:
    """Wait for the threads in which autograd computes on each device: they may still run a backward that has failed.

    Such a thread runs one task after another, and drops the remaining tasks of a backward that failed. So when it has
    run a new task, it has ended the old one. The new task has tensors without elements, and needs no memory.
    """
    for device in devices:
        if device.type != "cpu":
            with torch.enable_grad():
                nothing = torch.empty(0, device=device, requires_grad=True)
                torch.autograd.grad(nothing.view(0), nothing, torch.empty(0, device=device))
