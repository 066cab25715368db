"""Keeps users' hooks from running when gradsync runs the reducer's hooks without a gradient."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gradsync._state import SILENT

if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch


class silent:  # noqa: N801 - reads as a word where it is used
    """Context manager: inside, users' hooks on these parameters do not run, because no gradient arrives."""

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        parameters = list(parameters)
        self._ids = set(map(id, parameters))
        dicts = ((p._backward_hooks, getattr(p, "_post_accumulate_grad_hooks", None)) for p in parameters)
        self._dicts = [hooks for pair in dicts for hooks in pair if hooks]

    def __enter__(self) -> None:
        SILENT.update(self._ids)
        self._kept = [dict(hooks) for hooks in self._dicts]
        for hooks in self._dicts:
            hooks.clear()

    def __exit__(self, *_: object) -> None:
        SILENT.difference_update(self._ids)
        for hooks, kept in zip(self._dicts, self._kept, strict=True):
            hooks.update(kept)
