"""DDP that searches the graph for parameters that a backward does not reach.

The reducer waits for the hooks of the parameters that its search finds, and holds the others for ready at once. It
also notes which parameters were used, and all ranks together leave None what none of them used. It notes a parameter
in every backward that leaves it with a gradient, also in an unrelated one, or of gradients that were dropped since; it
then rejects an undefined gradient for it. So these notes are forgotten before the boundary's backward, whose search
finds all parameters that have a gradient already: their hooks run in it, and note them anew.

Private in torch, beside what `_ddp.py` names (read in torch 2.13): `torch._C._will_engine_execute_node`.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from gradsync.engines._ddp import DDPEngine
from gradsync.engines._ddp_usable import joined
from gradsync.engines._torch_privates import check_torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn
    from torch.nn.parallel import DistributedDataParallel


class SearchedEngine(DDPEngine):
    """One `DistributedDataParallel` with `find_unused_parameters=True`."""

    arms_replays = False  # the reducer would note what the replay reaches as used

    def __init__(self, ddp: DistributedDataParallel, module: nn.Module | None = None) -> None:
        check_torch("find_unused", C=torch._C)
        super().__init__(ddp, module)

    @staticmethod
    def fits(ddp: DistributedDataParallel) -> bool:
        """Whether `ddp` can have this engine."""
        return ddp.find_unused_parameters and not ddp.static_graph and not ddp._use_python_reducer

    @property
    def _watched(self) -> Sequence[nn.Parameter]:
        # The search finds it, so that no reduction is complete without it. Unless it has to, it finds no sparse one: if
        # that goes unused, its gradient could not stay None.
        return [next((p for p in self._reduced if id(p) not in self._sparse), self._reduced[0])]

    @property
    def _fills_unused(self) -> bool:
        return False

    @property
    def _orders_buckets(self) -> bool:
        return False

    def _prepare(self, loss: torch.Tensor | None) -> None:
        self._reducer._reset_state()
        self._reducer.prepare_for_forward()
        if loss is None:  # the search finds all; `finish` completes those that the backward does not reach
            self._reducer.prepare_for_backward([self._touch(self._reduced)])
            return
        watched = self._watched[0]
        due = [parameter for parameter in self._reduced if parameter.grad is not None or parameter is watched]
        joint = joined(due)
        self._reducer.prepare_for_backward([loss, joint])
        if loss.grad_fn is not None:
            self._watches.append(loss.grad_fn.register_prehook(partial(self._complete_unreached, due, joint)))

    def _complete_unreached(self, due: Sequence[nn.Parameter], joint: torch.Tensor, _: object) -> None:
        """Run the hooks of parameters that are due, but that the backward will not reach. It has come to the loss.

        `finish` would run them, too, but their buckets, and all after these, would travel after the backward.
        """
        reached = _will_reach(joint)
        if any(reached) or any(_will_reach(joined(self._reduced))):
            self._run_hooks([parameter for parameter, comes in zip(due, reached, strict=True) if not comes])


def _will_reach(joint: torch.Tensor) -> list[bool]:
    """Whether the backward that is running will give a gradient to each of the parameters that are joined."""
    graph: Any = joint.grad_fn
    try:
        return [torch._C._will_engine_execute_node(node) for node, _ in graph.next_functions]
    except RuntimeError:
        return []  # it is torch.autograd.grad of parameters, which gives them none
