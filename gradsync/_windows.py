"""All windows of one decorated function: which one a call belongs to, and what is done to all of them in turn."""

from __future__ import annotations

import itertools
import warnings
import weakref
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from gradsync._accumulation import Accumulation
from gradsync._cast import cast_of, check_cast
from gradsync._feed import Feed
from gradsync._progress import Progress
from gradsync.functional._agreement import nothing_here
from gradsync.functional._stream import length, lookahead

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from torch.optim import Optimizer

    from gradsync._settings import Settings

T = TypeVar("T")
Key = int | None  # id of the instance, for methods


class Windows:
    """The windows of a function, by instance and optimizers. They are kept by their optimizer, and die with it."""

    def __init__(self, name: str, settings: Settings) -> None:
        self._name = name
        self._settings = settings
        self._by_optimizer: weakref.WeakKeyDictionary[Optimizer, dict[tuple[Key, ...], Accumulation]] = (
            weakref.WeakKeyDictionary()
        )
        self._order = itertools.count()
        self._latest: dict[Key, weakref.ref[Accumulation]] = {}
        self._feeds: dict[Key, Feed] = {}
        self._loaded: dict[Key, list[dict[str, Any]]] = {}  # states that wait for their window's first call
        self._loaded_latest: dict[Key, int] = {}  # and which of these was called last

    def call(
        self, function: Callable[..., Any], instance: object, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """One micro-batch."""
        key = None if instance is None else id(instance)
        everything = args if instance is None else (instance, *args)
        participants = self._settings.casting.participants(everything, kwargs)
        latest = self._latest.get(key)
        accumulation = None if latest is None else latest()
        if accumulation is None or not accumulation.has(participants):
            accumulation = self._find(instance, key, participants)
        return accumulation.micro_batch(function, args, kwargs, self._feeds.get(key) if self._feeds else None)

    @contextmanager
    def fed(self, instance: object, num_items: int | None) -> Iterator[Feed]:
        """A feed that the calls of the loop inside know of."""
        key = None if instance is None else id(instance)
        feed, outer = Feed(num_items), self._feeds.get(key)
        self._feeds[key] = feed
        try:
            yield feed
        finally:
            if outer is None:
                del self._feeds[key]
            else:
                self._feeds[key] = outer

    def to_finish(self, feed: Feed, instance: object) -> list[Accumulation]:
        """The windows to close as the data of `feed` has ended here, those that it fed first.

        On other ranks it may go on, and they need this one in their synchronisations.
        """
        key = None if instance is None else id(instance)
        casting = self._settings.casting
        if not self._all(key) and casting.known():
            self._find(instance, key, casting.participants((), {}))
        accumulations = self._all(key)
        if not accumulations:
            nothing_here(self._name)
        return sorted(accumulations, key=lambda accumulation: not accumulation.is_fed_by(feed))

    def flush(self, key: Key) -> None:
        """Close what is open."""
        for accumulation in self._all(key):
            accumulation.flush()

    def reset(self, key: Key) -> None:
        """Discard what is open."""
        for accumulation in self._all(key):
            accumulation.discard()

    def progress(self, key: Key) -> Progress:
        """Of the window that was called last."""
        ref = self._latest.get(key)
        accumulation = None if ref is None else ref()
        if accumulation is not None:
            return accumulation.progress
        waiting, latest = self._loaded.get(key), self._loaded_latest.get(key, -1)
        return progress_in(waiting[latest]) if waiting else Progress()

    def state_dict(self, key: Key) -> dict[str, Any]:
        """All windows' states, in the order of their first call, and which of them was called last."""
        ref, called, waiting = self._latest.get(key), self._all(key), self._loaded.get(key, [])
        latest = len(called) + self._loaded_latest.get(key, -1) if ref is None else called.index(ref())
        return {"version": VERSION, "windows": [*(one.state_dict() for one in called), *waiting], "latest": latest}

    def load_state_dict(self, state: dict[str, Any], instance: object) -> None:
        """Put the states back; those of windows that are yet to be called wait for them.

        All are checked before any is loaded. A window that was called here, but not before the state was saved,
        begins anew.
        """
        key = None if instance is None else id(instance)
        states, called = windows_in(state), self._all(key)
        for accumulation, one in zip(called, states, strict=False):
            accumulation.check_state(one)
        for one in states[len(called) :]:
            check_steps_of(one, self._name, self._settings.steps)
        for accumulation in called:
            accumulation.discard()  # all of them first: one may have open what another is to open now
        for accumulation, one in itertools.zip_longest(called, states[: len(called)]):
            accumulation.begin_anew() if one is None else accumulation.load_state_dict(one)
        self._loaded[key], self._loaded_latest[key] = states[len(called) :], state["latest"] - len(called)
        ...

    def warn_if_open(self) -> None:
        """At the function's end, or the program's."""
        for accumulation in self._all(None, every=True):
            if accumulation.index:
                warnings.warn(
                    f"{self._name} ended with a window open: {accumulation.index} of {accumulation.progress.size} "
                    f"micro-batches were accumulated and never used. Iterate with {self._name}.over(...), or call "
                    f"{self._name}.flush() when the data ends.",
                    RuntimeWarning,
                    stacklevel=2,
                )

    def _find(self, instance: object, key: Key, participants: Sequence[object]) -> Accumulation:
        cast = cast_of(participants)
        check_cast(cast, self._name)
        full_key = (key, *map(id, cast.optimizers))
        table = self._by_optimizer.setdefault(cast.optimizers[0], {})
        accumulation = table.get(full_key)
        if accumulation is None:
            accumulation = Accumulation(self._name, next(self._order), self._settings, cast)
            if self._loaded:
                accumulation.load_state_dict(self._loaded.pop(0))
            table[full_key] = accumulation
            self._forget_with(instance, key, cast.optimizers[0], full_key)
        accumulation.bind(cast, participants)
        self._latest[key] = weakref.ref(accumulation)
        return accumulation

    def _forget_with(self, instance: object, key: Key, optimizer: Optimizer, full_key: tuple[Key, ...]) -> None:
        """Drop an instance's windows as it dies: another one may get its id."""
        if instance is None:
            return
        tables, latest, ref = self._by_optimizer, self._latest, weakref.ref(optimizer)

        def forget() -> None:
            latest.pop(key, None)
            alive = ref()
            if alive is not None:
                tables.get(alive, {}).pop(full_key, None)

        try:
            weakref.finalize(instance, forget).atexit = False
        except TypeError:
            return  # an instance with __slots__: its windows die with their optimizer

    def _all(self, key: Key, *, every: bool = False) -> list[Accumulation]:
        """In the order of their first call."""
        found = [
            accumulation
            for table in list(self._by_optimizer.values())
            for full_key, accumulation in table.items()
            if every or full_key[0] == key
        ]
        return sorted(found, key=lambda accumulation: accumulation.order)


def over(iterable: Iterable[T], decorated: Sequence[tuple[Windows, object]]) -> Iterator[T]:
    """The items of `iterable`; the calls of the `decorated` functions in between know which one is the last."""
    with ExitStack() as stack:
        feeds = [stack.enter_context(windows.fed(instance, length(iterable))) for windows, instance in decorated]
        for item, last in lookahead(iterable):
            for feed in feeds:
                feed.next_item(last=last)
            yield item
    fed: list[tuple[Accumulation, Feed]] = []
    others: list[tuple[Accumulation, Feed]] = []
    for (windows, instance), feed in zip(decorated, feeds, strict=True):
        for accumulation in windows.to_finish(feed, instance):
            (fed if accumulation.is_fed_by(feed) else others).append((accumulation, feed))
    while fed:  # in turn, as the calls of the other ranks alternate
        fed = [(accumulation, feed) for accumulation, feed in fed if accumulation.finish(feed)]
    for accumulation, feed in others:
        while accumulation.finish(feed):
            pass
