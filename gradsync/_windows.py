"""All windows of one decorated function: which one a call belongs to, and what is done to all of them in turn."""

from __future__ import annotations

import itertools
import warnings
import weakref
from contextlib import ExitStack, contextmanager, suppress
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from gradsync._accumulation import Accumulation
from gradsync._cast import cast_of, check_cast
from gradsync._feed import Feed
from gradsync._progress import Progress
from gradsync._state import VERSION, check_steps_of, progress_in, windows_in
from gradsync.functional._agreement import nothing_here
from gradsync.functional._stream import length, lookahead

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from torch import nn
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
        self._loaded: dict[Key, list[dict[str, Any]]] = {}  # states that wait for their window's first call,
        self._loaded_latest: dict[Key, int | None] = {}  # and which of a function's was called last

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
    def fed(self, instance: object, num_items: int | None, fed: dict[int, bool]) -> Iterator[Feed]:
        """A feed that the calls of the loop inside know of."""
        key = None if instance is None else id(instance)
        feed, outer = Feed(num_items, fed), self._feeds.get(key)
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
        return sorted(
            self._taking_part(instance, f"the data of {self._name}.over"), key=lambda one: not one.is_fed_by(feed)
        )

    def flush(self, instance: object) -> None:
        """Close what is open."""
        for accumulation in self._taking_part(instance, f"flush of {self._name}"):
            accumulation.flush()

    def _taking_part(self, instance: object, topic: str) -> list[Accumulation]:
        """The windows that take part in `topic`, where other ranks may need them although no call has made one here."""
        key = None if instance is None else id(instance)
        casting = self._settings.casting
        if not self._all(key) and casting.known():
            self._find(instance, key, casting.participants((), {}))
        found = self._all(key)
        if not found:
            nothing_here(topic)
        return found

    def reset(self, key: Key) -> None:
        """Discard what is open."""
        for accumulation in self._all(key):
            accumulation.reset()

    def progress(self, key: Key) -> Progress:
        """Of the window that was called last."""
        ref = self._latest.get(key)
        accumulation = None if ref is None else ref()
        if accumulation is not None:
            return accumulation.progress
        latest = self._loaded_latest.get(key)
        return Progress() if latest is None else progress_in(self._loaded[key][latest])

    def state_dict(self, key: Key) -> dict[str, Any]:
        """All windows' states, in the order of their first call, and which of them was called last."""
        called, ref = self._all(key), self._latest.get(key)
        latest = next((place for place, one in enumerate(called) if ref is not None and one is ref()), None)
        return {
            "version": VERSION,
            "windows": [*(one.state_dict() for one in called), *self._loaded.get(key, [])],
            "latest": latest if called else self._loaded_latest.get(key),
        }

    def load_state_dict(self, state: dict[str, Any], instance: object) -> None:
        """Put the states back; those of windows that are yet to be called wait for that.

        All are checked before one is loaded. A window whose first call came after the state was saved begins anew.
        """
        key = None if instance is None else id(instance)
        states, called = windows_in(state), self._all(key)
        for accumulation, one in zip(called, states, strict=False):
            accumulation.check_state(one)
        for one in states:
            check_steps_of(one, self._name, self._settings.steps)
        for accumulation in called:
            accumulation.begin_anew()
        for accumulation, one in zip(called, states, strict=False):
            accumulation.load_state_dict(one)
        latest = state["latest"]
        if latest is not None and latest < len(called):
            self._latest[key] = weakref.ref(called[latest])
        self._loaded[key], self._loaded_latest[key] = states[len(called) :], None if called else latest
        if instance is not None:
            self._forget_loaded_with(instance, key)

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
            waiting = self._loaded.get(key)
            with _keeping_buffers(cast.models if waiting and waiting[0]["index"] else ()):
                accumulation = Accumulation(self._name, next(self._order), self._settings, cast)
            if waiting:
                accumulation.check_state(waiting[0])
                accumulation.load_state_dict(waiting[0])
                self._loaded[key], self._loaded_latest[key] = waiting[1:], None
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

        _at_the_end_of(instance, forget)

    def _forget_loaded_with(self, instance: object, key: Key) -> None:
        loaded, latest = self._loaded, self._loaded_latest

        def forget() -> None:
            loaded.pop(key, None)
            latest.pop(key, None)

        _at_the_end_of(instance, forget)

    def _all(self, key: Key, *, every: bool = False) -> list[Accumulation]:
        """In the order of their first call."""
        found = [
            accumulation
            for table in list(self._by_optimizer.values())
            for full_key, accumulation in table.items()
            if every or full_key[0] == key
        ]
        return sorted(found, key=lambda accumulation: accumulation.order)


def _at_the_end_of(instance: object, forget: Callable[[], None]) -> None:
    """Call `forget` as the instance dies; one with __slots__ tells nobody, and its windows die with their optimizer."""
    with suppress(TypeError):
        weakref.finalize(instance, forget).atexit = False


@contextmanager
def _keeping_buffers(models: Iterable[nn.Module]) -> Iterator[None]:
    """Making an engine gives all ranks the buffers of rank 0, but in the middle of a window each has its own."""
    buffers = [buffer for model in models for buffer in model.buffers()]
    kept = [buffer.clone() for buffer in buffers]
    yield
    with torch.no_grad():
        for buffer, own in zip(buffers, kept, strict=True):
            buffer.copy_(own)


def over(iterable: Iterable[T], decorated: Sequence[tuple[Windows, object]]) -> Iterator[T]:
    """The items of `iterable`; the calls of the `decorated` functions in between know which one is the last."""
    called: dict[int, bool] = {}
    with ExitStack() as stack:
        feeds = [stack.enter_context(one.fed(instance, length(iterable), called)) for one, instance in decorated]
        for item, last in lookahead(iterable):
            for feed in feeds:
                feed.next_item(last=last)
            yield item
    fed: list[tuple[Accumulation, Feed]] = []
    others: list[tuple[Accumulation, Feed]] = []
    # Nested `.over`s: in the order in which the loop calls their functions, whichever way round they are nested.
    for (windows, instance), feed in sorted(zip(decorated, feeds, strict=True), key=lambda one: one[1].turn):
        for accumulation in windows.to_finish(feed, instance):
            (fed if accumulation.is_fed_by(feed) else others).append((accumulation, feed))
    for _, feed in others:
        feed.unsure = not fed and len(others) > 1
    while fed:  # in turn, as the calls of the other ranks alternate
        fed = [(accumulation, feed) for accumulation, feed in fed if accumulation.finish(feed)]
    for accumulation, feed in others:
        while accumulation.finish(feed):
            pass
