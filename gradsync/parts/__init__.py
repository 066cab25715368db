"""A micro-batch that does not fit in memory runs in parts: what the decorator's `fit` is made of."""

from gradsync.parts.cut import Cut, count_rows, cut_rows
from gradsync.parts.halving import Backward, Outcome, run_in_parts
from gradsync.parts.out_of_memory import is_out_of_memory
from gradsync.parts.remembered_fit import Fit
from gradsync.parts.sizes import Sizes

__all__ = ["Backward", "Cut", "Fit", "Outcome", "Sizes", "count_rows", "cut_rows", "is_out_of_memory", "run_in_parts"]
