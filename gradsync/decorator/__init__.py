"""`accumulating`: the typed shell, who takes part, a function's windows, a call, its checkpoint."""

from gradsync.decorator.accumulated import Accumulated
from gradsync.decorator.accumulating import accumulating
from gradsync.decorator.progress import Progress

__all__ = ["Accumulated", "Progress", "accumulating"]
