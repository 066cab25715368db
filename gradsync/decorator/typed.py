"""The type of a decorated function, for type checkers: the function's own signature, and what is added."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Concatenate, Protocol, TypeVar, overload

from typing_extensions import ParamSpec, Self

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from gradsync.decorator.progress import Progress

P = ParamSpec("P")
Q = ParamSpec("Q")
R_co = TypeVar("R_co", covariant=True)
S = TypeVar("S")
T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class SizedIterable(Protocol[T_co]):
    """What `over` returns: iterable, and sized if what it was given is."""

    def __iter__(self) -> Iterator[T_co]: ...

    def __len__(self) -> int: ...


class Accumulated(Protocol[P, R_co]):
    """A step function under `accumulating`: each call is a micro-batch."""

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R_co:
        """Run one micro-batch; returns what the function returned, its loss detached."""
        ...

    @overload
    def __get__(self, instance: None, owner: type, /) -> Self: ...
    @overload
    def __get__(
        self: Accumulated[Concatenate[S, Q], R_co], instance: S, owner: type | None = None, /
    ) -> Accumulated[Q, R_co]: ...

    def over(self, iterable: Iterable[T], /) -> SizedIterable[T]:
        """`iterable` again, sized if it was; its last call closes the window.

        Ranks may hold different numbers of items.
        """
        ...

    def flush(self) -> None:
        """Close the open windows now. Collective: every rank calls it, after the same number of closed windows."""
        ...

    def settle(self) -> None:
        """With `overlap`: wait for gradients that still travel, and make their update. Not collective."""
        ...

    def reset(self) -> None:
        """Discard the open windows, with their gradients."""
        ...

    @property
    def progress(self) -> Progress:
        """Counters, loss and gradient norm of the window that was called last."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """The counters, and mid-window this rank's gradients: plain dicts, numbers and tensors."""
        ...

    def load_state_dict(self, state: dict[str, Any], /) -> None:
        """Restore what `state_dict` returned. A state loaded before the first call is checked and used in that call."""
        ...
