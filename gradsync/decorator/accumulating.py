"""The decorator: its arguments, and what it cannot decorate."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar, cast

from typing_extensions import ParamSpec

from gradsync.decorator.accumulated import Accumulated, AccumulatedFunction
from gradsync.decorator.participants import Naming
from gradsync.decorator.settings import Compress, Settings
from gradsync.functional import NonFinite, Steps, Sync, Tail
from gradsync.parts import Cut

P = ParamSpec("P")
R = TypeVar("R")
F = TypeVar("F", bound="Callable[..., Any]")


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
    - `sync`: "window" synchronises at the boundary only. On FSDP, "each" does so at each micro-batch, which takes less
      memory, and "shard" reduce-scatters each and all-reduces at the boundary (HSDP).
    - `nonfinite`: what to do with a window whose gradients have an inf or a NaN: "step" (no check), "skip", "raise".
    - `skip`: exception types that drop one micro-batch on one rank instead of ending the run; where a backward raises
      them, they drop the window on all ranks.
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
    settings = Settings(**locals())  # its fields have the names of the arguments above
    _refuse_bare(steps)

    def decorate(function: Callable[P, R]) -> Accumulated[P, R]:
        _check_function(function)
        return AccumulatedFunction(function, settings)

    return decorate


def _check_function(function: object) -> None:
    inner = inspect.unwrap(getattr(function, "__func__", function))  # type: ignore[arg-type]
    name, what, once = getattr(inner, "__qualname__", repr(inner)), None, ""
    # What runs is the function, or the method of an object that is called.
    runs = inner, getattr(type(inner), "__call__", None)  # noqa: B004
    if isinstance(function, Accumulated):
        what, once = f"{name} is decorated already", " once"
    elif not callable(inner) or isinstance(function, type):
        what = f"got {function!r} of type {type(function).__name__}"
    elif any(map(inspect.isasyncgenfunction, runs)):
        what = f"{name} is an async generator function"
    elif any(map(inspect.iscoroutinefunction, runs)):
        what = f"{name} is an async function"
    elif any(map(inspect.isgeneratorfunction, runs)):
        what = f"{name} is a generator function"
    if what is not None:
        raise TypeError(
            f"accumulating decorates a step function{once}, but {what}. Write @accumulating(steps=4) on the line above "
            "the def of a plain function that returns the loss of one micro-batch."
        )


def _refuse_bare(steps: Steps) -> None:
    """`@accumulating` without arguments puts the step function where `steps` belongs."""
    if not callable(steps):
        return
    try:
        inspect.signature(steps).bind(0)
    except TypeError:
        raise TypeError(
            "accumulating needs the number of steps, or a function of the window's number, but got "
            f"{getattr(steps, '__qualname__', steps)}, which looks like the step function itself. Write "
            "@accumulating(steps=4), with its parentheses."
        ) from None
    except ValueError:
        pass  # a function of C may have no signature
