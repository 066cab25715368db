"""`fit`: a call runs its body and its backward in as many parts as memory needs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gradsync._errors import is_misuse
from gradsync.functional import InParts, PartedBackward
from gradsync.ranks.lost import is_lost

if TYPE_CHECKING:
    from collections.abc import Callable

    from gradsync.decorator.updater import Updater
    from gradsync.functional import Closing, Place
    from gradsync.parts import Cut


class BodyInParts:
    """Runs the micro-batches of one call, and remembers the size that fits."""

    def __init__(self, fit: bool | Cut, updater: Updater) -> None:  # noqa: FBT001 - the user's
        self._fitted = InParts(fit, updater.run.name)
        self._updater = updater

    def micro_batch(
        self, place: Place, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, Closing | None]:
        """Run the user's function and its backward; returns what it returned (None if it is dropped)."""
        updater = self._updater
        run, record = updater.run, updater.record
        one = PartedBackward(run, place, scaler=updater.scaler, changes=updater.watch.check)
        try:
            returned = self._fitted.run(one, function, args, kwargs)
        except BaseException as error:  # noqa: BLE001 - goes on, if it is not to be skipped
            return None, self._fail(one, error)
        record.parts, record.rows = self._fitted.parts, self._fitted.rows
        num_dropped = run.num_dropped
        closing = one.end()
        return returned if run.num_dropped == num_dropped else None, closing

    def _fail(self, one: PartedBackward, error: BaseException) -> Closing | None:
        """A part failed for another reason than memory, or could not be cut."""
        if one.begun is not None:
            return one.end(error)
        if not isinstance(error, self._updater.settings.skip) or is_misuse(error) or is_lost(error):
            raise error
        run = self._updater.run
        return run.drop(one.place, error if one.has_changed else None)
