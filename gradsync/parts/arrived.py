"""Which parameters a backward has reached: known without hooks, and looked at only if it fails."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch


class Arrived:
    """The gradients before a backward, to be compared with those after it has failed.

    A backward adds each parameter's whole gradient at once, and where it does, `grad` becomes another object or a
    newer version of the same. The objects themselves are not kept: a reducer may put its own in their place, and the
    old ones would then stay in memory, in the backward that lacks it. Views count their versions together (gradients
    in a bucket), and so hooks watch these.
    """

    __slots__ = ("_before", "_handles", "_parameters", "_told")

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        self._parameters = parameters
        self._before = [
            None if (gradient := parameter.grad) is None else (id(gradient), gradient._version, gradient._is_view())
            for parameter in parameters
        ]
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
        if len({parameter.device for parameter in self._parameters}) > 1:
            time.sleep(0.05)  # each device has a thread of its own, which may still finish what it is at
        pairs = zip(self._parameters, self._before, strict=True)
        return [one for one, before in pairs if one.requires_grad and not self._has_got(one, before)]

    def _has_got(self, parameter: torch.Tensor, before: tuple[int, int, bool] | None) -> bool:
        gradient = parameter.grad
        if gradient is None or before is None:
            return gradient is not None
        if before[2]:
            return id(parameter) in self._told
        return (id(gradient), gradient._version, gradient._is_view()) != before

    def _tell(self, parameter: torch.Tensor) -> None:
        self._told.add(id(parameter))
