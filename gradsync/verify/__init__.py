"""`python -m gradsync verify`: tries the library's promises on the machines at hand.

Each cell of the table is a promise on an engine. It runs on real ranks (`even`, `uneven`, `also`, `homes`), and is
compared with one big batch in float64 on one process (`reference`, which knows nothing of gradsync). `table` says where
an engine cannot keep a promise, and which error must come instead. `_job` starts ranks (`_rank`), all of them or one
for a process of torchrun's, which try one cell after another. A cell that fails or hangs ends them, and new ranks go on
with the next cell.
"""

from gradsync.verify._cli import main

__all__ = ["main"]
