"""Models that take part in a step but are not trained by it: a GAN's other half, a frozen teacher."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gradsync.functional._micro_batch import Hold

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn

    from gradsync.engines import Engine


class Bystanders:
    """Context manager: gradients flow through these parameters and none stay in them; their engines are held.

    It must span the backward too: checkpointed layers run their forward again in there.
    """

    __slots__ = ("_hold", "_parameters", "_switched_off")

    def __init__(self, parameters: Sequence[nn.Parameter], engines: Sequence[Engine]) -> None:
        self._parameters = parameters
        self._hold = Hold(engines)
        self._switched_off: list[nn.Parameter] = []

    def __enter__(self) -> None:
        self._hold.__enter__()
        self._switched_off = [parameter for parameter in self._parameters if parameter.requires_grad]
        for parameter in self._switched_off:
            parameter.requires_grad_(requires_grad=False)

    def __exit__(self, *exception: object) -> None:
        for parameter in self._switched_off:
            parameter.requires_grad_(requires_grad=True)
        self._switched_off = []
        self._hold.__exit__(*exception)
