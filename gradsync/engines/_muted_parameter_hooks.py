"""Keeps users' hooks from running when gradsync runs the reducer's hooks without a gradient."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch


class silent:  # noqa: N801 - reads as a word where it is used
    """Context manager: inside, users' hooks on these parameters do not run, because no gradient arrives."""

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        dicts = ((p._backward_hooks, getattr(p, "_post_accumulate_grad_hooks", None)) for p in parameters)
        self._dicts = [hooks for pair in dicts for hooks in pair if hooks]

    def __enter__(self) -> None:
        self._kept = [dict(hooks) for hooks in self._dicts]
        for hooks in self._dicts:
            hooks.clear()

    def __exit__(self, *_: object) -> None:
        for hooks, kept in zip(self._dicts, self._kept, strict=True):
            hooks.update(kept)
