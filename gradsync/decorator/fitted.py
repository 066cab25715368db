"""A call with `fit`: its body and its backward, in as many parts as memory needs."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from gradsync._errors import GradSyncError
from gradsync.functional._fit import Fitted, OneBackward
from gradsync.ranks.lost import is_lost

if TYPE_CHECKING:
    from collections.abc import Callable

    from gradsync.decorator.call import Call
    from gradsync.functional import Closing, Place
    from gradsync.parts import Cut


class FittedCall:
    """What `fit` remembers between the micro-batches of one `Call`, and how the last of them ran."""

    def __init__(self, fit: bool | Cut, call: Call) -> None:  # noqa: FBT001 - its user's
        self._fitted = Fitted(fit, call.name)
        self._call = weakref.ref(call)

    @property
    def parts(self) -> int:
        """In how many the last call ran."""
        return self._fitted.parts

    @property
    def rows(self) -> int | None:
        """Those of its largest part."""
        return self._fitted.rows

    def micro_batch(
        self, place: Place, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, Closing | None]:
        """Run the user's function and its backward; returns what it returned (None where it is dropped)."""
        call = self._call()
        assert call is not None, "it is running"
        run = call.run
        changes = lambda: call.watch.check(call.name, place.index)  # noqa: E731
        one = OneBackward(run, place, scaler=call.scaler, changes=changes)
        try:
            returned = self._fitted.run(one, function, args, kwargs)
        except BaseException as error:  # noqa: BLE001 - goes on, if it is not to be skipped
            return None, _fail(call, one, error)
        num_dropped = run.num_dropped
        closing = one.end()
        return returned if run.num_dropped == num_dropped else None, closing


def _fail(call: Call, one: OneBackward, error: BaseException) -> Closing | None:
    """A part failed, and not for lack of memory, or could not be cut."""
    if one.begun is not None:
        return one.end(error)
    if not isinstance(error, call.settings.skip) or isinstance(error, GradSyncError) or is_lost(error):
        raise error
    return call.run.spoil(one.place, error) if one.has_changed else call.run.drop(one.place)
