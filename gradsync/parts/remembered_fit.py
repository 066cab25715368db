"""What a function that runs in parts remembers between its calls."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import nn

from gradsync._errors import GradSyncError
from gradsync.engines import Engine
from gradsync.parts.before import ForwardState
from gradsync.parts.cut import Arguments, Cut, count_rows, cut_rows
from gradsync.parts.refuse import check_engines, check_models
from gradsync.parts.sizes import Sizes


class Fit:
    """The sizes that fit, and what calls change beside gradients; one for each window that a function has.

    It keeps no model alive.
    """

    def __init__(self, fit: bool | Cut = True, *, name: str = "A call") -> None:  # noqa: FBT001, FBT002 - its user's
        if fit is not True and not callable(fit):
            raise TypeError(
                f"fit must be True, False or a function of (args, kwargs, parts) that returns the arguments of each "
                f"part, but it is {fit!r}."
            )
        self._cut: Cut = cut_rows if fit is True else fit
        self._is_own = fit is not True
        self.name = name
        self.sizes = Sizes()
        self.unchecked = True  # whether the next graph must be checked before its backward
        self._models: Sequence[weakref.ref[nn.Module]] = ()
        self.state = ForwardState()  # that of the models

    def open(self, models: Sequence[nn.Module], engines: Iterable[Engine] = ()) -> None:
        """A window opens: take its models, and raise if a cut could not be exact."""
        self._models = [weakref.ref(model) for model in models]
        check_models(models)
        check_engines(engines)
        self.state = ForwardState(models).like(self.state)

    def check_call(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Raise unless this call could be cut: asked early, because memory may run out only after hours."""
        if not self._is_own and count_rows(args, kwargs) is None:
            raise GradSyncError(
                f"fit=True cuts the tensors among the arguments of {self.name} into parts, but there is none, in "
                "lists, tuples and dicts either. Give fit a function of (args, kwargs, parts) that returns the "
                "arguments of each part."
            )

    def check_again(self) -> None:
        """An attempt has failed: check again, because models may have changed since the window opened."""
        check_models(model for ref in self._models if (model := ref()) is not None)
        self.unchecked = True

    def rows(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int | None:
        """How many rows a call has; None if that is not known."""
        try:
            return count_rows(args, kwargs)
        except GradSyncError:
            if self._is_own:
                return None
            raise

    def cut(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], parts: int) -> list[Arguments]:
        """The arguments of each part; fewer than two parts if they cannot be cut."""
        came: Any = self._cut(args, kwargs, parts)
        pieces = list(came) if isinstance(came, Iterable) else [came]
        if not all(map(_is_pair, pieces)):
            raise GradSyncError(
                f"The function that fit is given for {self.name} must return the arguments of each part, a list of "
                "pairs (args, kwargs), each a tuple and a dict, but something else came. Return, for instance, "
                "[((model, optimizer, some), kwargs), ((model, optimizer, others), kwargs)]."
            )
        return [(tuple(some), dict(others)) for some, others in pieces]


def _is_pair(piece: object) -> bool:
    """Whether this is a part's (args, kwargs)."""
    if not isinstance(piece, tuple | list) or len(piece) != 2:
        return False
    return isinstance(piece[0], tuple | list) and isinstance(piece[1], Mapping)
