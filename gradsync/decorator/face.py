"""What a decorated function shows: repr, help, and the error for positional arguments of `accumulating`."""

from __future__ import annotations

from functools import wraps
from typing import TYPE_CHECKING, Any, TypeVar, cast

if TYPE_CHECKING:
    from collections.abc import Callable

    from gradsync.decorator.settings import Settings

F = TypeVar("F", bound="Callable[..., Any]")

OWN = ("over", "flush", "settle", "reset", "progress", "state_dict", "load_state_dict")
"""What a decorated function has beside its call."""

_HELP = """Under gradsync.accumulating({settings}): each call is a micro-batch. It has

    .over(iterable)             the iterable again; its last call closes the window
    .flush()                    close the open windows now, on all ranks together
    .settle()                   wait for gradients that still travel (overlap)
    .reset()                    discard the open windows, with their gradients
    .progress                   counters, loss and gradient norm; see gradsync.Progress
    .state_dict(), .load_state_dict(state)
    .__wrapped__                the function itself, to evaluate with
"""


def representation(function: object, settings: Settings) -> str:
    """`<function train_step at ..., under accumulating(steps=4)>`, for a method too."""
    inner = repr(function)
    inner = inner[1:-1] if inner.startswith("<") else inner
    return f"<{inner} under accumulating({settings.in_words()}), with {', '.join('.' + own for own in OWN)}>"


def documentation(function: object, settings: Settings) -> str:
    """The function's own docstring, and below it what is added, for `help`."""
    own = getattr(function, "__doc__", None)
    added = _HELP.format(settings=settings.in_words())
    return added if not own else f"{own.rstrip()}\n\n{_indented(added, own)}"


def _indented(text: str, own: str) -> str:
    """`text` indented like the docstring `own`, because `help` removes the common margin."""
    lines = [line for line in own.splitlines()[1:] if line.strip()]
    margin = " " * min((len(line) - len(line.lstrip()) for line in lines), default=0)
    return "".join(margin + line if line.strip() else line for line in text.splitlines(keepends=True))


def keywords_after_steps(accumulating: F) -> F:
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
