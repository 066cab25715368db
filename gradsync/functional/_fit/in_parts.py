"""A micro-batch of a `Run`, run in as many parts as memory needs."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from types import TracebackType
from typing import Any

import torch
from torch.amp import GradScaler

from gradsync._errors import GradSyncError
from gradsync._loss import LossSum, tensor_of
from gradsync.engines import find
from gradsync.functional._team.team import Team
from gradsync.functional._window.boundary import Held
from gradsync.functional._window.closing import Closing
from gradsync.functional._window.place import Place, Role
from gradsync.functional._window.run import Run
from gradsync.functional._window.window import weigh
from gradsync.parts import Backward, Cut, Fit, is_out_of_memory, run_in_parts
from gradsync.ranks.lost import is_lost


class InParts:
    """Runs the micro-batches of one function in as many parts as memory needs, and remembers the size that fits.

    `cut` is the `fit` of `accumulating`; `name` stands in errors. Make one for each function. `parts` and `rows` tell
    how the last micro-batch ran.

    >>> from gradsync import functional as F
    >>> run, model = F.Run("example", F.Terms(steps=1)), torch.nn.Linear(1, 1)
    >>> in_parts = F.InParts(True, run.name)
    >>> place = run.start(F.Who([model]))
    >>> with run.holding(place):
    ...     loss, closing = in_parts.run(run, place, lambda rows: model(rows).mean(), (torch.ones(4, 1),), {})
    >>> in_parts.parts, in_parts.rows, closing.factor, run.close()
    (1, 4, 1.0, None)
    """

    def __init__(self, cut: bool | Cut, name: str) -> None:  # noqa: FBT001 - the user's own value
        self.parts = 1
        self.rows: int | None = None
        self._fit = Fit(cut, name=name)
        self._team: Callable[[], Team | None] = lambda: None  # the team that was checked last, held weakly

    def run(
        self,
        run: Run,
        place: Place,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        *,
        scaler: GradScaler | None = None,
        changes: Callable[[], object] = lambda: None,
    ) -> tuple[Any, Closing | None]:
        """Run `function` and its backward. Returns what it returned (None if dropped), and what `Run.backward` returns.

        `changes` is called once, right before the first gradient of this micro-batch is accumulated. An exception of a
        type in `skip` drops the micro-batch; or the window, on all ranks, if a gradient has been accumulated.
        """
        if place.role is Role.MISSES:  # a replay on engines that need none: only what it returns is wanted
            returned, self.parts, self.rows = run_in_parts(function, args, kwargs, Backward(), self._fit)
            return returned, run.miss(place)
        team, checked = run.fitting_team(), self._team()
        if place.index == 0 or team is not checked:
            models = run.who.models
            self._fit.open(models, () if team is checked else [*team.engines, *find(models)])
            self._team = weakref.ref(team)
        backward = _BackwardOfWindow(run, place, scaler, changes)
        returned, num_dropped = None, run.num_dropped
        with backward:
            returned, self.parts, self.rows = run_in_parts(function, args, kwargs, backward, self._fit)
        return returned if run.num_dropped == num_dropped else None, backward.closing


class _BackwardOfWindow(Backward):
    """The backward of one micro-batch, inside which its parts run. The engines synchronise in the last part only."""

    def __init__(self, run: Run, place: Place, scaler: GradScaler | None, changes: Callable[[], object]) -> None:
        self.parameters = run.fitting_team().parameters
        self.closing: Closing | None = None
        self._begun: Held | None = None  # set when the real backward begins, that of the last part
        self._first: torch.Tensor | LossSum | None = None  # until then: that of the first part, once its own has begun
        self._run, self._place, self._scaler, self._changes = run, place, scaler, changes

    def begin(self, loss: torch.Tensor | LossSum, weight: float) -> tuple[torch.Tensor, torch.Tensor | None]:
        tensor, seed = weigh(self._run.open_window, loss, self._scaler)
        if weight != 1.0:
            seed = torch.full_like(tensor, weight) if seed is None else seed * weight
        if self._first is None and self._begun is None:
            self._changes()
            self._first = loss
        return tensor, seed

    def run(self, tensor: torch.Tensor, seed: torch.Tensor | None, whole: torch.Tensor | LossSum) -> None:
        try:
            self._begin(tensor, whole)
        except Exception as error:
            if is_out_of_memory(error):
                raise GradSyncError(
                    "The ranks exchange a small table, and buffers where there are any, before a window's gradients "
                    "synchronise, but there was no memory left for these. Leave more room: fewer rows a call."
                ) from error
            raise
        tensor.backward(seed)

    def _begin(self, tensor: torch.Tensor, loss: torch.Tensor | LossSum) -> None:
        self._first = None  # the ranks must not begin twice
        self._begun = self._run.begin(self._place, loss).__enter__()
        self._begun.order.arm(tensor)

    def held(self) -> ExitStack:
        stack = ExitStack()
        for engine in () if self._begun is None else self._begun.order.armed:
            stack.enter_context(engine.holding_armed())
        return stack

    def __enter__(self) -> None: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> bool:
        run, first = self._run, self._first
        if error is not None and first is not None and not is_lost(error):
            self._begin(tensor_of(first), first)  # the other ranks may wait in its collectives
        if self._begun is not None:
            drops = self._begun.__exit__(kind, error, where)
            self.closing = self._begun.closing
            return drops
        # It failed before any backward, for another reason than memory, or it could not be cut.
        if error is None or not run.terms.skips(error):
            return False
        self.closing = run.drop(self._place)
        return True
