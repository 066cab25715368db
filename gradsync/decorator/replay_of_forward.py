"""`Replay`: the last call of a step function, kept to be made once more when other ranks wait in its forward."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

_DATA = (torch.Tensor, str, bytes, int, float, complex, bool, type(None), torch.device, torch.dtype)


class Replay:
    """The last call of a step function, to be repeated when other ranks wait in its forward.

    It is made before the function runs, which may take items out of a batch. Data is kept; everything else is
    referenced weakly: it keeps no model, no optimizer and no trainer alive.
    """

    __slots__ = ("_args", "_function", "_instance", "_kwargs")

    def __init__(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        instance = getattr(function, "__self__", None)
        self._function: Any = function if instance is None else getattr(function, "__func__", function)
        self._instance = None if instance is None else _kept(instance)
        self._args = _kept(args)
        self._kwargs = _kept(kwargs)

    @property
    def is_alive(self) -> bool:
        """Whether all its arguments are still there."""
        try:
            self._restored()
        except ReferenceError:
            return False
        return True

    def __call__(self) -> Any:
        """Make the call once more."""
        args, kwargs = self._restored()
        return self._function(*args, **kwargs)

    def _restored(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        first = () if self._instance is None else (_restored(self._instance),)
        return (*first, *_restored(self._args)), _restored(self._kwargs)


class _Remembered(weakref.ref[Any]):
    """A reference of ours: the user's data may hold others."""

    __slots__ = ()


def _kept(one: Any) -> Any:
    if isinstance(one, _DATA):
        return one.detach() if type(one) is torch.Tensor and one.grad_fn is not None else one
    if type(one) in {tuple, list, set}:
        return type(one)(map(_kept, one))
    if type(one) is dict:
        return {key: _kept(value) for key, value in one.items()}
    try:
        return _Remembered(one)
    except TypeError:
        return one  # it cannot be referenced weakly, like a named tuple: the user's data


def _restored(one: Any) -> Any:
    if isinstance(one, _Remembered):
        found = one()
        if found is None:
            raise ReferenceError("an argument of the last call is gone")
        return found
    if type(one) in {tuple, list, set}:
        return type(one)(map(_restored, one))
    if type(one) is dict:
        return {key: _restored(value) for key, value in one.items()}
    return one
