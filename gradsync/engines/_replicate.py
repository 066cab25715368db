"""The composable `replicate`: a `DistributedDataParallel` of the module's parameters, behind hooks of the module.

It is made as the first forward begins, from what `replicate` was told, and its switch is read there.

Private in torch (read in torch 2.13; `tests/test_engines_torch.py` fails when it changes): of `replicate.state(module)`
`lazy_init`, `_init_args`, `_ddp`, `_no_sync`, `_param_list`, `_param_names`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.distributed._composable.replicate import replicate

from gradsync.engines._ddp import DDPEngine

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import nn


class ReplicateEngine(DDPEngine):
    """One module that `torch.distributed._composable.replicate` was called on."""

    def __init__(self, module: nn.Module) -> None:
        self._state: Any = replicate.state(module)
        if self._state._init_args:
            self._state.lazy_init()
        super().__init__(self._state._ddp, module)

    def hold(self) -> Any:
        found = self._state._no_sync, super().hold()
        self._state._no_sync = True  # its hook writes this over DDP's own switch in each forward
        return found

    def restore(self, found: Any) -> None:
        self._state._no_sync, flags = found
        super().restore(flags)

    def named_parameters(self) -> Iterable[tuple[str, nn.Parameter]]:
        return zip(self._state._param_names, self._state._param_list, strict=True)
