"""`Accumulated`: a decorated function, its own signature for type checkers, and what is added to it."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any, Concatenate, Generic, TypeVar, overload

import wrapt
from typing_extensions import ParamSpec, Self

from gradsync.decorator.over import Over, SizedOver, loop_of_call
from gradsync.decorator.progress import Progress
from gradsync.decorator.settings import Settings
from gradsync.decorator.windows_of_function import WindowsOfFunction
from gradsync.functional import length

P = ParamSpec("P")
Q = ParamSpec("Q")
R_co = TypeVar("R_co", covariant=True)
S = TypeVar("S")
T = TypeVar("T")


class Accumulated(Generic[P, R_co]):
    """A step function under `accumulating`, bound to an instance or not: each call is a micro-batch."""

    if TYPE_CHECKING:  # wrapt has these, and the attributes of the function
        __wrapped__: Callable[P, R_co]

        @property
        def _windows(self) -> WindowsOfFunction: ...

        def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R_co:
            """Run one micro-batch; returns what the function returned, its loss detached."""
            ...

        @overload
        def __get__(self, instance: None, owner: type, /) -> Self: ...
        @overload
        def __get__(
            self: Accumulated[Concatenate[S, Q], R_co], instance: S, owner: type | None = None, /
        ) -> Accumulated[Q, R_co]: ...
        def __get__(self, instance: Any, owner: Any = None, /) -> Any: ...

    def over(self, iterable: Iterable[T]) -> Over[T]:
        """The iterable again, sized if it was; where it ends, the window closes, unless `tail` is "carry".

        Ranks may hold different numbers of items. What reads ahead goes inside: `step.over(prefetch(loader))`.
        """
        return (Over if length(iterable) is None else SizedOver)(iterable, self._windows)

    def flush(self) -> None:
        """Close the open windows now. Collective: every rank calls it, after the same number of closed windows."""
        self._windows.flush()

    def settle(self) -> None:
        """With `overlap`: wait for gradients that still travel, and make their update. Not collective."""
        self._windows.settle()

    def reset(self) -> None:
        """Discard the open windows, with their gradients."""
        self._windows.reset()

    @property
    def progress(self) -> Progress:
        """Counters, loss and gradient norm of the window that was called last."""
        return self._windows.progress

    def state_dict(self) -> dict[str, Any]:
        """The counters, and mid-window this rank's gradients: plain dicts, numbers and tensors."""
        return self._windows.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned. A state loaded before the first call is checked and used in that call."""
        self._windows.load_state_dict(state)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *_OWN, "__wrapped__"})

    def __repr__(self) -> str:
        inner = repr(self.__wrapped__)
        inner = inner[1:-1] if inner.startswith("<") else inner
        settings = self._windows.settings.in_words()
        return f"<{inner} under accumulating({settings}), with {', '.join('.' + own for own in _OWN)}>"

    # `__doc__` is the function's own docstring. `help` does not call this method (since Python 3.9), and so it finds
    # `_HELP`, which also lists what is added.
    def __getattribute__(self, name: str) -> Any:
        return self.__wrapped__.__doc__ if name == "__doc__" else super().__getattribute__(name)

    def __setattr__(self, name: str, value: object) -> None:
        if name in Settings.__dataclass_fields__:
            raise AttributeError(
                f"{name} of a decorated function is what it was decorated with, and cannot be set to {value!r} later. "
                f"Decorate with the other value, accumulating({name}=...); steps may be a function of the window's "
                "number."
            )
        super().__setattr__(name, value)

    def __reduce_ex__(self, _: object) -> str | tuple[Any, ...]:
        return self.__reduce__()

    def __copy__(self) -> Self:
        return self


_OWN = [name for name in vars(Accumulated) if not name.startswith("_")]
"""What a decorated function has beside its call."""


def _documentation(decorated: Accumulated[..., Any]) -> str:
    """The function's own docstring, and below it what is added, for `help`."""
    settings = decorated._windows.settings.in_words()
    added = f"Under gradsync.accumulating({settings}): each call is a micro-batch. It has\n"
    for name in _OWN:
        added += f"\n    .{name}: {(inspect.getdoc(vars(Accumulated)[name]) or '').splitlines()[0]}"
    own = decorated.__wrapped__.__doc__
    return f"{inspect.cleandoc(own)}\n\n{added}" if own else added


_HELP = property(_documentation)

if TYPE_CHECKING:
    _BoundWrapper = wrapt.BoundFunctionWrapper[..., Any]
    _Wrapper = wrapt.FunctionWrapper[..., Any]
else:  # they take no parameters before wrapt 2.2
    _BoundWrapper, _Wrapper = wrapt.BoundFunctionWrapper, wrapt.FunctionWrapper


class _AccumulatedMethod(Accumulated[P, R_co], _BoundWrapper):  # type: ignore[misc] # `__get__`
    __doc__ = _HELP  # pyright: ignore[reportAssignmentType]

    @property
    def _windows(self) -> WindowsOfFunction:
        instance = self._self_instance
        # What wrapt hands to a call: the class of a classmethod, and nothing of a staticmethod.
        if self._self_binding in {"classmethod", "staticmethod"}:
            instance = getattr(self.__wrapped__, "__self__", None)
        return self._self_parent._windows.of(instance)  # type: ignore[no-any-return]

    # A bound method is copied and pickled like Python's own: the instance, and the name of the method. What is taken
    # from the class is a function.
    def __reduce__(self) -> tuple[Any, ...]:
        home = self._self_owner if self._self_instance is None else self._self_instance
        return getattr, (home, self.__name__)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if self._self_instance is None:
            return self
        return getattr(copy.deepcopy(self._self_instance, memo), self.__name__)


class AccumulatedFunction(Accumulated[P, R_co], _Wrapper):  # type: ignore[misc] # noqa: D101
    __bound_function_wrapper__ = _AccumulatedMethod
    __doc__ = _HELP  # pyright: ignore[reportAssignmentType]

    def __init__(self, function: Callable[P, R_co], settings: Settings) -> None:
        code = getattr(inspect.unwrap(getattr(function, "__func__", function)), "__code__", None)
        place = (code.co_filename, code.co_firstlineno) if code is not None else ("gradsync", 0)
        inner = function.func if isinstance(function, partial) else function
        name = getattr(inner, "__qualname__", type(inner).__qualname__).rpartition("<locals>.")[2]
        all_windows = WindowsOfFunction(name, settings, place)
        bound = inspect.ismethod(function)  # a bound method was decorated: only wrapt knows its instance

        def call(wrapped: Callable[..., Any], instance: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            windows = all_windows if bound else all_windows.of(instance)
            loop = loop_of_call(windows) if windows.loops or windows.read_ahead else None
            return windows.call((wrapped, args, kwargs), loop)

        super().__init__(function, call)
        self._self_windows = all_windows

    @property
    def _windows(self) -> WindowsOfFunction:
        return self._self_windows

    # A decorated function is copied as itself and pickled by its name, like any function. Its windows are not copied.
    def __reduce__(self) -> str:
        return self.__qualname__

    def __deepcopy__(self, memo: dict[int, Any]) -> AccumulatedFunction[P, R_co]:
        if not inspect.ismethod(self.__wrapped__):
            return self
        # A bound method is copied with its instance, like Python's own, and so are the models that were named.
        settings = copy.deepcopy(self._windows.settings, memo)
        return AccumulatedFunction(copy.deepcopy(self.__wrapped__, memo), settings)
