"""The decorator: a typed shell around a wrapt core."""

from __future__ import annotations

import atexit
import copy
import inspect
from functools import partial, wraps
from typing import TYPE_CHECKING, Any, TypeVar, cast

import wrapt
from typing_extensions import ParamSpec

from gradsync._state import FUNCTIONS
from gradsync.decorator.over import Over, over
from gradsync.decorator.participants import Finder, Naming
from gradsync.decorator.registry import Registries
from gradsync.decorator.settings import Compress, Settings, Sync

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from gradsync.decorator.progress import Progress
    from gradsync.decorator.registry import Registry
    from gradsync.decorator.typed import Accumulated
    from gradsync.functional import NonFinite, Steps, Tail
    from gradsync.parts import Cut

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")
F = TypeVar("F", bound="Callable[..., Any]")

_OWN = ("over", "flush", "settle", "reset", "progress", "state_dict", "load_state_dict")
"""What a decorated function has beside its call."""

_ADDED = """Under gradsync.accumulating({settings}): each call is a micro-batch. It has

    .over(iterable)             the iterable again; its last call closes the window
    .flush()                    close the open windows now, on all ranks together
    .settle()                   wait for gradients that still travel (overlap)
    .reset()                    discard the open windows, with their gradients
    .progress                   counters, loss and gradient norm; see gradsync.Progress
    .state_dict(), .load_state_dict(state)
    .__wrapped__                the function itself, to evaluate with
"""


def _keywords_after_steps(accumulating: F) -> F:
    """Make `accumulating(4, model, optimizer)` an error that says what to write."""

    @wraps(accumulating)
    def called(*args: Any, **kwargs: Any) -> Any:
        if len(args) > 1:
            raise TypeError(
                "accumulating needs the number of steps, and all else by keyword, but got "
                f"{', '.join(type(one).__name__ for one in args)}. Write @accumulating(steps=4): models, optimizers "
                "and schedulers are found among the arguments of each call, or named with model=, optimizer= and "
                "scheduler=."
            )
        return accumulating(*args, **kwargs)

    return cast("F", called)


@_keywords_after_steps
def accumulating(
    steps: Steps,
    *,
    model: Naming = None,
    optimizer: Naming = None,
    scheduler: Naming = None,
    scaler: Naming = None,
    clip_norm: float | None = None,
    tail: Tail = "step",
    sync: Sync = "window",
    nonfinite: NonFinite = "step",
    skip: type[Exception] | tuple[type[Exception], ...] = (),
    on_update: Callable[..., Any] | None = None,
    overlap: int = 0,
    compress: Compress | None = None,
    fit: bool | Cut = False,
) -> Callable[[Callable[P, R]], Accumulated[P, R]]:
    """Make a step function accumulate: each call is a micro-batch, each `steps` calls an update.

    The function returns the unscaled loss. Backward, synchronisation, step and zero_grad are done for it, with the
    models, optimizers, schedulers and the GradScaler among its arguments, or with those that the keywords name: an
    object, a tuple of objects, or a function of the call's arguments.

    - `steps`: micro-batches in a window; an int, or a function of the window's number.
    - `clip_norm`: the largest norm of all gradients together.
    - `tail`: what to do with a window that is short because the data ended: "step" makes an update with its exact mean,
      "drop" discards it, "carry" keeps it open.
    - `sync`: "window" synchronises at the boundary only, "each" at each micro-batch, "shard" reduce-scatters each and
      all-reduces at the boundary (HSDP).
    - `nonfinite`: what to do with a window whose gradients have an inf or a NaN: "step" (no check), "skip", "raise".
    - `skip`: exception types that drop one micro-batch on one rank instead of ending the run.
    - `on_update`: called with the `progress` after each update on every rank, also after updates that a rank makes when
      its own data has ended. If the function is a method, it gets the instance first.
    - `overlap`: how many micro-batches of a window run while the gradients of the window before travel. 0 is exact.
      With more, parameters between calls are provisional, and true in `on_update` and after `settle()`.
    - `compress`: with "bf16", gradients travel and are added up in bfloat16: half the bytes, for bare models.
    - `fit`: whether a call that runs out of memory goes on in parts. True cuts the tensors among the arguments along
      their first dimension. For anything else, pass a function of (args, kwargs, parts) that returns the (args, kwargs)
      of each part (without the instance of a method). The loss must be a mean over rows, or a `LossSum`.

    >>> @gradsync.accumulating(steps=2)
    ... def train_step(model, optimizer, batch):
    ...     return model(batch).square().mean()
    >>> model = torch.nn.Linear(1, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> for batch in train_step.over(torch.ones(5, 3, 1)):
    ...     loss = train_step(model, optimizer, batch)
    >>> train_step.progress.updates
    3
    """
    _refuse_bare(steps)
    settings = Settings(
        steps=steps,
        finder=Finder(model, optimizer, scheduler, scaler),
        clip_norm=clip_norm,
        tail=tail,
        sync=sync,
        nonfinite=nonfinite,
        skip=skip if isinstance(skip, tuple) else (skip,),
        on_update=on_update,
        overlap=overlap,
        compress=compress,
        fit=fit,
    )

    def decorate(function: Callable[P, R]) -> Accumulated[P, R]:
        _check_function(function)
        return cast("Accumulated[P, R]", _Accumulating(function, settings))

    return decorate


class _Controls:
    """The methods of a decorated function, bound to an instance or not."""

    @property
    def _registry(self) -> Registry:
        raise NotImplementedError

    @property
    def _instance(self) -> object:
        return None

    def over(self, iterable: Iterable[T]) -> Over[T]:
        """The iterable again, sized if it was; its last call closes the window.

        Ranks may hold different numbers of items. What reads ahead goes inside: `step.over(prefetch(loader))`.
        """
        return over(iterable, self._registry, self._instance)

    def flush(self) -> None:
        """Close the open windows now. Collective: every rank calls it, after the same number of closed windows."""
        self._registry.flush(self._instance)

    def settle(self) -> None:
        """With `overlap`: wait for gradients that still travel, and make their update. Not collective."""
        self._registry.settle()

    def reset(self) -> None:
        """Discard the open windows, with their gradients."""
        self._registry.reset()

    @property
    def progress(self) -> Progress:
        """Counters, loss and gradient norm of the window that was called last."""
        return self._registry.progress

    def state_dict(self) -> dict[str, Any]:
        """The counters, and mid-window this rank's gradients: plain dicts, numbers and tensors."""
        return self._registry.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned. A state loaded before the first call is checked and used in that call."""
        self._registry.load_state_dict(state)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *_OWN, "__wrapped__"})

    def __repr__(self) -> str:
        inner = repr(self.__wrapped__)
        inner = inner[1:-1] if inner.startswith("<") else inner
        settings = self._registry.settings.in_words()
        return f"<{inner} under accumulating({settings}), with {', '.join('.' + own for own in _OWN)}>"

    # `__doc__` is the function's own docstring. `help` does not call this method (since Python 3.9), and so it finds
    # `_HELP`, which also lists what is added.
    def __getattribute__(self, name: str) -> Any:
        return self.__wrapped__.__doc__ if name == "__doc__" else super().__getattribute__(name)

    def __setattr__(self, name: str, value: object) -> None:
        if name in _SETTINGS:
            raise AttributeError(
                f"{name} of a decorated function is what it was decorated with, and cannot be set to {value!r} later. "
                f"Decorate with the other value, accumulating({name}=...); steps may be a function of the window's "
                "number."
            )
        super().__setattr__(name, value)


def _documentation(decorated: _Controls) -> str:
    """The function's own docstring, and below it what is added, for `help`."""
    own = decorated.__wrapped__.__doc__
    added = _ADDED.format(settings=decorated._registry.settings.in_words())
    return added if not own else f"{own.rstrip()}\n\n{_indented(added, own)}"


_HELP = property(_documentation)
_SETTINGS = {*Settings.__dataclass_fields__, "model", "optimizer", "scheduler", "scaler"}


class _BoundAccumulating(_Controls, wrapt.BoundFunctionWrapper[..., Any]):
    __doc__ = _HELP  # pyright: ignore[reportAssignmentType]

    @property
    def _registry(self) -> Registry:
        return self._self_parent._self_registries.of(self._instance)  # type: ignore[no-any-return]

    @property
    def _instance(self) -> object:
        # What wrapt hands to a call: the class of a classmethod, and nothing of a staticmethod.
        if self._self_binding in {"classmethod", "staticmethod"}:
            return getattr(self.__wrapped__, "__self__", None)
        return self._self_instance

    # A bound method is copied and pickled like Python's own: the instance, and the name of the method. What is taken
    # from the class is a function.
    def __reduce__(self) -> tuple[Any, ...]:
        home = self._self_owner if self._self_instance is None else self._self_instance
        return getattr, (home, self.__name__)

    def __reduce_ex__(self, _: object) -> tuple[Any, ...]:
        return self.__reduce__()

    def __copy__(self) -> _BoundAccumulating:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if self._self_instance is None:
            return self
        return getattr(copy.deepcopy(self._self_instance, memo), self.__name__)


class _Accumulating(_Controls, wrapt.FunctionWrapper[..., Any]):
    __bound_function_wrapper__ = _BoundAccumulating
    __doc__ = _HELP  # pyright: ignore[reportAssignmentType]

    def __init__(self, function: Callable[..., Any], settings: Settings) -> None:
        code = getattr(inspect.unwrap(getattr(function, "__func__", function)), "__code__", None)
        place = (code.co_filename, code.co_firstlineno) if code is not None else ("gradsync", 0)
        inner = function.func if isinstance(function, partial) else function
        name = getattr(inner, "__qualname__", type(inner).__qualname__).rpartition("<locals>.")[2]
        registries = Registries(name, settings, place)
        bound = inspect.ismethod(function)  # a bound method was decorated: only wrapt knows its instance

        def call(wrapped: Callable[..., Any], instance: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            own = None if bound else instance
            return registries.of(own).call(wrapped, own, args, kwargs)

        super().__init__(function, call)
        self._self_registries = registries
        FUNCTIONS.add(registries)

    # Not `weakref.finalize`: that would hold the windows until the function ends, and with them `on_update`, which may
    # refer to the function. They would keep each other alive, and the model.
    def __del__(self) -> None:
        self._self_registries.warn_if_open()

    @property
    def _registry(self) -> Registry:
        return self._self_registries.of(None)

    # A decorated function is copied as itself and pickled by its name, like any function. Its windows are not copied.
    def __reduce__(self) -> str:
        return self.__qualname__

    def __reduce_ex__(self, _: object) -> str:
        return self.__reduce__()

    def __copy__(self) -> _Accumulating:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> _Accumulating:
        if not inspect.ismethod(self.__wrapped__):
            return self
        # A bound method is copied with its instance, like Python's own, and so are the models that were named.
        settings = copy.deepcopy(self._registry.settings, memo)
        return _Accumulating(copy.deepcopy(self.__wrapped__, memo), settings)


@atexit.register
def _warn_of_open_windows() -> None:
    for registries in list(FUNCTIONS):
        registries.warn_if_open()


def _check_function(function: object) -> None:
    if isinstance(function, _Controls):
        raise TypeError(
            f"accumulating decorates a step function once, but {function!r} came. Leave one of the two decorations out."
        )
    inner = inspect.unwrap(getattr(function, "__func__", function))  # type: ignore[arg-type]
    if not callable(inner) or isinstance(function, type):
        raise TypeError(
            f"accumulating decorates a step function, but got {function!r} of type {type(function).__name__}. "
            "Write @accumulating(steps=4) on the line above a def."
        )
    name = getattr(inner, "__qualname__", repr(inner))
    for matches, what in (
        (inspect.isasyncgenfunction, "an async generator function"),
        (inspect.iscoroutinefunction, "an async function"),
        (inspect.isgeneratorfunction, "a generator function"),
    ):
        if matches(inner):
            raise TypeError(
                f"accumulating decorates a function that returns its loss, but {name} is {what}. "
                "Decorate the plain function that computes the loss of one micro-batch."
            )


def _refuse_bare(steps: object) -> None:
    """`@accumulating` without arguments puts the step function where `steps` belongs."""
    if not callable(steps):
        return
    try:
        parameters = inspect.signature(steps).parameters.values()
    except (TypeError, ValueError):
        return
    needed = [p for p in parameters if p.default is p.empty and p.kind in {p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD}]
    if len(needed) > 1 or not parameters:
        raise TypeError(
            "accumulating needs the number of steps, or a function of the window's number, but got "
            f"{getattr(steps, '__qualname__', steps)}, which looks like the step function itself. Write "
            "@accumulating(steps=4), with its parentheses."
        )


def _indented(text: str, own: str) -> str:
    """`text` indented like the docstring `own`, because `help` removes the common margin."""
    lines = [line for line in own.splitlines()[1:] if line.strip()]
    margin = " " * min((len(line) - len(line.lstrip()) for line in lines), default=0)
    return "".join(margin + line if line.strip() else line for line in text.splitlines(keepends=True))
