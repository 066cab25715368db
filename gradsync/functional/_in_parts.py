"""A micro-batch of a `Run`, run in as many parts as memory needs."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch

from gradsync._errors import GradSyncError
from gradsync._loss import LossSum
from gradsync.engines import find
from gradsync.parts import Fit, Outcome, Work, is_out_of_memory, run_in_parts

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch.amp import GradScaler

    from gradsync.functional._boundary import Passage
    from gradsync.functional._closing import Closing
    from gradsync.functional._place import Place
    from gradsync.functional._run import Run
    from gradsync.functional._team import Team
    from gradsync.parts import Cut


class InParts:
    """Runs the micro-batches of one function in as many parts as memory needs, and remembers the size that fits.

    `cut` is the `fit` of `accumulating`; `name` stands in errors. Make one for each function, and a `PartedBackward`
    for each micro-batch. `parts` and `rows` tell how the last micro-batch ran.

    >>> from gradsync import functional as F
    >>> run, model = F.Run("example", F.Terms(steps=1)), torch.nn.Linear(1, 1)
    >>> in_parts = F.InParts(True, run.name)
    >>> place = run.start(F.Who([model]))
    >>> with run.holding(place):
    ...     backward = F.PartedBackward(run, place)
    ...     loss = in_parts.run(backward, lambda rows: model(rows).mean(), (torch.ones(4, 1),), {})
    ...     closing = backward.end()
    >>> in_parts.parts, in_parts.rows, closing.factor, run.close()
    (1, 4, 1.0, None)
    """

    def __init__(self, cut: bool | Cut, name: str) -> None:  # noqa: FBT001 - the user's own value
        self.parts = 1
        self.rows: int | None = None
        self._fit = Fit(cut, name=name)
        self._team: Team | None = None  # the team that was checked last

    def run(
        self, backward: PartedBackward, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        """Run `function` and its backward; return what `function` returned. Call `backward.end()` after it."""
        run, team = backward.run, backward.run.fitting_team()
        if backward.place.index == 0 or team is not self._team:
            models = run.who.models
            self._fit.open(models, () if team is self._team else [*team.engines, *find(models)])
            self._team = team
        work = Work(
            function, backward.weigh, backward.backward, team.parameters, held=backward.held, begin=backward.begin
        )
        return self._returned(run_in_parts(work, args, kwargs, self._fit))

    def run_forward(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run `function` without a backward, in parts of the same size: for a replay on engines that need none."""
        work = Work(function, lambda loss, _: (_tensor(loss), None), lambda *_: None, ())
        return self._returned(run_in_parts(work, args, kwargs, self._fit))

    def _returned(self, outcome: Outcome) -> Any:
        self.parts, self.rows = outcome.parts, outcome.rows
        return outcome.returned


class PartedBackward:
    """The backward of one micro-batch that may run in parts. The engines synchronise in the last part only."""

    def __init__(
        self,
        run: Run,
        place: Place,
        *,
        scaler: GradScaler | None = None,
        changes: Callable[[], object] = lambda: None,
    ) -> None:
        """`changes` is called once, right before the first gradient of this micro-batch is accumulated."""
        self.run, self.place = run, place
        self.begun: Passage | None = None  # set when the backward of the last part begins
        self.has_changed = False  # whether a gradient of this micro-batch may have been accumulated
        self._scaler, self._changes = scaler, changes

    def begin(self) -> None:
        """To be called before gradients change."""
        if not self.has_changed:
            self._changes()
            self.has_changed = True

    def weigh(self, loss: torch.Tensor | LossSum, weight: float) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The tensor from which the backward of a part runs, and the gradient to begin with (None: 1)."""
        window = self.run.window
        assert window is not None, "a place has been started"
        tensor, seed = window.weigh(loss, self._scaler)
        if weight != 1.0:
            seed = torch.full_like(tensor, weight) if seed is None else seed * weight
        return tensor, seed

    def backward(self, tensor: torch.Tensor, seed: torch.Tensor | None, whole: torch.Tensor | LossSum) -> None:
        """The backward in which the engines synchronise, where it is their time."""
        try:
            self.begun = self.run.begin(self.place, whole)
        except Exception as error:
            if is_out_of_memory(error):  # the ranks must not begin twice
                raise GradSyncError(
                    "The ranks exchange a small table, and buffers where there are any, before a window's gradients "
                    "synchronise, but there was no memory left for these. Leave more room: fewer rows a call."
                ) from error
            raise
        for engine in self.begun.order.armed:
            engine.arm(tensor)
        tensor.backward(seed)

    def held(self) -> ExitStack:
        """A context for the parts that run after that backward has failed: it keeps the armed engines held."""
        stack = ExitStack()
        for engine in () if self.begun is None else self.begun.order.armed:
            stack.enter_context(engine.holding_armed())
        return stack

    def end(self, error: BaseException | None = None) -> Closing | None:
        """To be called when all parts have run, or the backward of the last has failed with `error`."""
        if self.begun is None:
            assert error is not None, "the backward of the last part has begun"
            raise error
        return self.begun.end(error)


def _tensor(loss: torch.Tensor | LossSum) -> torch.Tensor:
    return loss.loss if isinstance(loss, LossSum) else loss
