"""A rank whose library is wrong in one cell, hangs in another, and dies in a third.

    python -m tests.verify.broken TASK
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time

import gradsync.decorator.updater as updates
from gradsync.verify._rank import Task, main
from gradsync.verify.table import CELLS

BREAK = {"full_windows": "wrong", "tail_over": "hangs", "tail_flush": "dies"}  # and the other cells are as they are


def broken(how: str, play):
    def in_its_place(home):
        if how == "wrong":
            right = updates.update
            updates.update = lambda *args, **options: right(*args, **{**options, "factor": 2 * options["factor"]})
        elif how == "hangs" and home.rank == 1:
            time.sleep(600)
        elif home.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        play(home)

    return in_its_place


if __name__ == "__main__":
    for (engine, row), cell in list(CELLS.items()):
        if row in BREAK:
            CELLS[engine, row] = cell._replace(row=cell.row._replace(play=broken(BREAK[row], cell.row.play)))
    main(Task(**json.loads(sys.argv[1])))
