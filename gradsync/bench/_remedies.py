"""The decorator's keywords that make synchronisation take less time, and the price of each."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple


class Remedy(NamedTuple):
    """One combination of keywords."""

    fixed: Mapping[str, str]
    """Keywords whose value is the same everywhere."""
    overlaps: bool
    """Whether `overlap` is among the keywords; its value depends on the link."""
    bytes_sent: float
    """As a share of the gradients' own bytes."""
    price: str
    """What changes in the training, as the end of a sentence; `{first}` stands for the micro-batches that overlap."""

    def keywords(self, overlap: int) -> dict[str, Any]:
        """Return what a user passes to `accumulating` beside `steps`."""
        return {**({"overlap": overlap} if self.overlaps else {}), **self.fixed}

    def written(self, steps: int, overlap: int) -> str:
        """Return the line that a user writes."""
        given = {"steps": steps, **self.keywords(overlap)}
        values = (f'{name}="{value}"' if isinstance(value, str) else f"{name}={value}" for name, value in given.items())
        return f"@gradsync.accumulating({', '.join(values)})"

    def told(self, overlap: int) -> str:
        """Tell the price with this many micro-batches overlapping."""
        first = "the first micro-batch" if overlap == 1 else f"the first {overlap} micro-batches"
        return self.price.format(first=f"{first} of a window {'is' if overlap == 1 else 'are'}")

    def lacking(self, accumulating: Callable[..., Any]) -> list[str]:
        """Name the keywords that this `accumulating` does not have."""
        return [name for name in self.keywords(1) if name not in inspect.signature(accumulating).parameters]


_HALVED = "gradients are added up in bfloat16"

REMEDIES: Mapping[str, Remedy] = {
    "overlap": Remedy({}, overlaps=True, bytes_sent=1.0, price="{first} computed on provisional parameters"),
    "bf16": Remedy({"compress": "bf16"}, overlaps=False, bytes_sent=0.5, price=_HALVED),
    "both": Remedy(
        {"compress": "bf16"},
        overlaps=True,
        bytes_sent=0.5,
        price=f"{{first}} computed on provisional parameters, and {_HALVED}",
    ),
}
"""By the name of the way that measures it; the simplest first."""
