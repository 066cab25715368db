"""`accumulating`, the decorator. README.md says what is in which file."""

from gradsync.decorator.accumulated import Accumulated
from gradsync.decorator.accumulating import accumulating
from gradsync.decorator.progress import Progress

__all__ = ["Accumulated", "Progress", "accumulating"]
