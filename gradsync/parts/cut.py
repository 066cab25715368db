"""Finds the tensors among a call's arguments that have its rows, and cuts them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch

from gradsync._errors import GradSyncError

Arguments: TypeAlias = tuple[tuple[Any, ...], Mapping[str, Any]]
Cut: TypeAlias = Callable[[tuple[Any, ...], Mapping[str, Any], int], Sequence[Arguments]]


def count_rows(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int | None:
    """How many rows the tensors among these arguments have; None where there is no tensor.

    Tensors without a dimension have none; lists, tuples and mappings are looked into, other objects are not.

    >>> count_rows((torch.zeros(6, 2), {"target": torch.zeros(6)}), {"scale": torch.tensor(2.0)})
    6
    """
    rows, first = None, ""
    for name, tensor in _tensors(args, kwargs):
        if not tensor.dim():
            continue
        if tensor.layout != torch.strided or tensor.is_nested:
            raise GradSyncError(
                f"A call that is to be cut into parts needs plain tensors, but {name} is "
                f"{'nested' if tensor.is_nested else tensor.layout}. Give fit a function of (args, kwargs, parts) "
                "that returns the arguments of each part."
            )
        if rows is None:
            rows, first = tensor.shape[0], name
        elif tensor.shape[0] != rows:
            raise GradSyncError(
                "The tensors among the arguments of a call that is to be cut into parts must have equally many rows "
                f"(their first dimension), but {first} has {rows} and {name} has {tensor.shape[0]}. Give fit a "
                "function of (args, kwargs, parts) that returns the arguments of each part."
            )
    return rows


def first_rows(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int | None:
    """The rows of the first tensor, for a record; unlike `count_rows`, it does not check the others."""
    for one in args:
        if isinstance(one, torch.Tensor) and one.dim():
            return one.shape[0]
    return next((tensor.shape[0] for _, tensor in _tensors(args, kwargs) if tensor.dim()), None)


def cut_rows(args: tuple[Any, ...], kwargs: Mapping[str, Any], parts: int) -> list[Arguments]:
    """The arguments of each part: tensors become views of some of their rows, everything else is handed on whole.

    Parts differ by one row at most, and there are never more parts than rows.

    >>> [rows.tolist() for (rows,), _ in cut_rows((torch.arange(5),), {}, 2)]
    [[0, 1, 2], [3, 4]]
    """
    rows = count_rows(args, kwargs) or 0
    parts = max(1, min(parts, rows))
    each, more = divmod(rows, parts)
    stops = [part * each + min(part, more) for part in range(parts + 1)]
    return [
        (tuple(_slice(one, some) for one in args), {name: _slice(one, some) for name, one in kwargs.items()})
        for some in map(slice, stops, stops[1:])
    ]


def shape_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
    """What a call's memory depends on beside its number of rows: the shape and dtype of a row of each tensor."""
    return tuple((tuple(tensor.shape[1:]), tensor.dtype) for _, tensor in _tensors(args, kwargs))


def _tensors(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    for index, one in enumerate(args):
        yield from _tensors_in(one, f"argument {index}")
    for name, one in kwargs.items():
        yield from _tensors_in(one, f"argument {name!r}")


def _tensors_in(one: Any, name: str) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(one, torch.Tensor):
        yield name, one
    elif isinstance(one, list | tuple):
        for index, inner in enumerate(one):
            yield from _tensors_in(inner, f"{name}[{index}]")
    elif isinstance(one, Mapping):
        for key, inner in one.items():
            yield from _tensors_in(inner, f"{name}[{key!r}]")


def _slice(one: Any, some: slice) -> Any:
    """The same structure with some rows of each tensor."""
    if isinstance(one, torch.Tensor):
        return one[some] if one.dim() else one
    if not _holds_tensors(one):
        return one  # the object itself: a body may change it
    if isinstance(one, Mapping):
        return _slice_mapping(one, some)
    inner = [_slice(each, some) for each in one]
    if hasattr(one, "_fields"):
        return type(one)(*inner)  # a named tuple
    return inner if isinstance(one, list) else tuple(inner)


def _slice_mapping(one: Mapping[Any, Any], some: slice) -> Mapping[Any, Any]:
    inner = {key: _slice(each, some) for key, each in one.items()}
    if type(one) is dict:
        return inner
    try:
        copied: Any = copy.copy(one)  # any class of mapping, with its other attributes
        for key, each in inner.items():
            copied[key] = each
    except TypeError:  # it cannot be copied, or written to
        return inner
    return copied  # type: ignore[no-any-return]


def _holds_tensors(one: Any) -> bool:
    return next(_tensors_in(one, ""), None) is not None
