"""`rows_that_fit`: a size of micro-batches that fits on all ranks, found before training."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist
from torch import nn

from gradsync._errors import GradSyncError
from gradsync._loss import find_loss, tensor_of
from gradsync.engines import Engine, find
from gradsync.functional._team.hold import Hold
from gradsync.functional._team.no_sync import check_modules
from gradsync.parts.before import Before, ForwardState
from gradsync.parts.out_of_memory import free, is_out_of_memory, let_go
from gradsync.parts.peak import Meter, Took, is_room, meter_of
from gradsync.ranks.group import require_group, several_ranks
from gradsync.ranks.lost import WaitingFor
from gradsync.ranks.meet import agreed, meet


def rows_that_fit(
    model: nn.Module | Sequence[nn.Module],
    function: Callable[[int], Any],
    most: int,
    *,
    meter: Meter | None = None,
) -> int:
    """The number of rows that fits in memory on all ranks: 1, 2, 4, ... up to `most`. Collective.

    `function(rows)` returns the loss of a micro-batch with `rows` rows; its backward is run as well. All ranks try the
    same sizes, from one row upwards. From the third size on, they try it only if every rank expects it to fit, by the
    memory that the last two sizes took: a rank that failed in the middle of a forward that communicates would leave the
    others waiting. If an attempt fails on all ranks all the same, the size before it is the answer. No gradients are
    left; buffers and random state are put back. Make the optimizer's state first (a step with zero gradients), so that
    its memory is taken into account. `meter` measures an attempt in place of the device's own counters.

    >>> model = torch.nn.Linear(2, 1)
    >>> gradsync.functional.rows_that_fit(model, lambda rows: model(torch.ones(rows, 2)).sum(), most=6)
    6
    """
    models = check_modules(model, "functional.rows_that_fit")
    if not isinstance(most, int) or most < 1:
        raise ValueError(f"most must be the largest number of rows to try, from 1, but it is {most!r}.")
    require_group("functional.rows_that_fit")
    trial = _Trial(models, function, meter)
    said = trial.say("the start of rows_that_fit", {"most": most})
    agreed([(one["rank"], one["most"]) for one in said], "most")
    found, rows, before = 0, 1, None
    while True:
        took, error = trial.run(rows)
        following = min(2 * rows, most)
        goes_on = took is None or is_room(before, took, following / rows)
        with WaitingFor(lambda: f"hearing whether {rows} rows fit on the other ranks"):  # noqa: B023 - at once
            said = trial.say(f"trying {rows} rows", {"fits": error is None, "goes on": goes_on})
        lacking = ", ".join(str(one["rank"]) for one in said if not one["fits"])
        if lacking and not found:
            raise GradSyncError(
                f"One row must fit in memory on every rank, but it does not on rank {lacking}. Shard the model more, "
                "recompute activations (torch.utils.checkpoint), or shorten the rows."
            ) from error
        if lacking:
            return found
        if rows == most or not all(one["goes on"] for one in said):
            return rows
        found, rows, before = rows, following, took


def _groups(engines: Sequence[Engine]) -> list[dist.ProcessGroup]:
    """The groups to meet in, one after another, so that each rank hears from all others. Empty on one rank."""
    if engines:
        # Those that run one forward together (tensor parallel) are of different groups of an engine.
        return [engines[0].group, *engines[0].twins]
    return [dist.group.WORLD] if several_ranks() else []  # type: ignore[list-item]


class _Trial:
    """Runs attempts. Each leaves everything as it was."""

    def __init__(self, models: Sequence[nn.Module], function: Callable[[int], Any], meter: Meter | None) -> None:
        engines = find(models)
        self._function, self._engines = function, engines
        self._parameters = [parameter for model in models for parameter in model.parameters()]
        self._meter = meter or meter_of(self._parameters[0].device)
        self._hold = Hold(engines)
        self._state = ForwardState(models)
        self._groups = _groups(engines)
        if any(parameter.grad is not None for parameter in self._parameters):
            raise GradSyncError(
                "rows_that_fit needs a model without gradients, which an attempt would add to, but there are some. "
                "Call it between windows, after zero_grad()."
            )

    def say(self, topic: str, words: dict[str, Any]) -> list[dict[str, Any]]:
        """What all ranks of the model say on `topic`, with their numbers."""
        said = [{**words, "rank": dist.get_rank() if self._groups else 0}]
        for group in self._groups:
            said = [one for heard in meet(group, topic, {"said": said}) for one in heard["said"]]
        return said

    def run(self, rows: int) -> tuple[Took | None, Exception | None]:
        """What an attempt took; or its error, if it ran out of memory."""
        before = Before(self._state, (), {})
        try:
            return self._meter(lambda: self._attempt(rows)), None
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            let_go(error, None)
            failure = error
        finally:
            before.put_back()
            for engine in self._engines:
                engine.discard()
                engine.ungather()
            for parameter in self._parameters:
                parameter.grad = None
        free()
        return None, failure

    def _attempt(self, rows: int) -> None:
        with self._hold:
            tensor_of(find_loss(self._function(rows))).backward()
