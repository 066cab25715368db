"""The composable `replicate`: a `DistributedDataParallel` of the module's parameters, behind hooks of the module.

torch makes the DDP when the first forward begins, from the arguments of `replicate`, and reads its `_no_sync` in each
forward.

Private in torch (read in torch 2.13; `tests/engines/test_torch_sharded.py` fails when it changes): of
`replicate.state(module)` `lazy_init`, `_init_args`, `_ddp`, `_no_sync`, `_param_list`, `_param_names`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.distributed._composable.replicate import replicate

from gradsync.engines._ddp import DDPEngine
from gradsync.engines._ddp_alone import AloneEngine
from gradsync.engines._ddp_searched import SearchedEngine
from gradsync.engines._ddp_static import StaticEngine
from gradsync.engines._torch_privates import check_torch

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import nn


class _Replicated(DDPEngine):
    """One module that `torch.distributed._composable.replicate` was called on."""

    def __init__(self, state: Any, module: nn.Module) -> None:
        self._state = state
        super().__init__(state._ddp, module)

    @property
    def carrier(self) -> None:
        return None  # the user has no DDP

    def hold(self) -> Any:
        found = self._state._no_sync, super().hold()
        self._state._no_sync = True  # in each forward, a hook sets DDP's own flag from this one
        return found

    def restore(self, found: Any) -> None:
        self._state._no_sync, flags = found
        super().restore(flags)

    def named_parameters(self) -> Iterable[tuple[str, nn.Parameter]]:
        return zip(self._state._param_names, self._state._param_list, strict=True)


class _ReplicatedStatic(_Replicated, StaticEngine):
    """The same with a static graph."""


class _ReplicatedSearched(_Replicated, SearchedEngine):
    """The same that looks for unused parameters."""


class _ReplicatedAlone(_Replicated, AloneEngine):
    """The same in a group of one rank."""


def replicate_engine(module: nn.Module) -> DDPEngine:
    """The engine of a module that `replicate` was called on."""
    state: Any = replicate.state(module)
    check_torch("replicate", state=state)
    if state._init_args:
        state.lazy_init()
    if AloneEngine.fits(state._ddp):
        return _ReplicatedAlone(state, module)
    if SearchedEngine.fits(state._ddp):
        return _ReplicatedSearched(state, module)
    return (_ReplicatedStatic if state._ddp.static_graph else _Replicated)(state, module)
