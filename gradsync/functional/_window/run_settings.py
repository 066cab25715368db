"""`Terms`: the settings of a run. `Who`: the models and optimizers whose windows these are."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import nn
from torch.optim import Optimizer

from gradsync.functional._window.steps import Steps, check_steps, window_size
from gradsync.functional._window.tail import Tail


@dataclass(frozen=True)
class Terms:
    """The settings of all windows of a run, the same on all ranks.

    `words` has other settings, which the ranks only compare. `skip` has the exception types that drop a micro-batch.
    `repeats` says when a rank whose data has ended must have a micro-batch to repeat: where "forwards" communicate,
    or "always". Without `keeps_losses` a closing's mean loss is NaN.
    """

    steps: Steps
    tail: Tail = "step"
    repeats: Literal["forwards", "always"] = "forwards"
    sync: str = "window"
    skip: tuple[type[BaseException], ...] = ()
    words: Mapping[str, Any] = field(default_factory=dict)
    keeps_losses: bool = True

    def __post_init__(self) -> None:
        check_steps(self.steps)

    def in_words(self, number: int) -> dict[str, Any]:
        """What the ranks compare for window `number`."""
        steps = window_size(self.steps, number)
        skip = [kind.__name__ for kind in self.skip]
        kind = "a function" if callable(self.steps) else "a number"
        return {
            "steps": steps, "kind of steps": kind, "tail": self.tail, "sync": self.sync, "skip": skip, **self.words
        }  # fmt: skip


class Who:
    """The models and optimizers whose windows these are, held weakly. Without optimizers, all models are trained."""

    __slots__ = ("_models", "_optimizers")

    def __init__(self, models: Sequence[nn.Module] = (), optimizers: Sequence[Optimizer] = ()) -> None:
        self._models = [weakref.ref(model) for model in models]
        self._optimizers = [weakref.ref(optimizer) for optimizer in optimizers]

    @property
    def models(self) -> list[nn.Module]:
        """Those that are alive."""
        return [model for ref in self._models if (model := ref()) is not None]

    @property
    def optimizers(self) -> list[Optimizer]:
        """Those that are alive."""
        return [optimizer for ref in self._optimizers if (optimizer := ref()) is not None]
