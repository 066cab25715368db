"""`python -m gradsync verify`: the library's promises, tried on the machines at hand.

Each cell of the table is a promise on an engine, played on real ranks (`even`, `uneven`, `homes`), and compared with
one big batch in float64 on one process (`reference`, which knows nothing of gradsync). `table` says where a promise
cannot be had, and which error stands there. `_job` starts ranks (`_rank`) that try one cell after another, by itself or
for one process of torchrun's; a cell that fails or hangs ends them, and the next ones begin after it.
"""

from gradsync.verify._cli import main

__all__ = ["main"]
