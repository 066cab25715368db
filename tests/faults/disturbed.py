"""Runs a script with a fault in it: a rank that is killed at some line of gradsync or of the script, or stands still.

    python tests/faults/disturbed.py SPEC script.py options...

SPEC is JSON. The lines that a rank runs are counted, those of gradsync and of the script only: a kill comes at the
`line`-th, or `delay` seconds after it, which is then wherever the rank is, in torch's C++ too. `rank` and `attempt` say
whose and in which of torchrun's attempts. With `function`, its calls are counted in the place of lines. With `pause`, the
rank does not die, but makes that file and waits until it is gone. Without a line nothing happens, and the number of
lines is written to `count`. `timeout` is the process group's.
"""

from __future__ import annotations

import functools
import json
import os
import runpy
import signal
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

import gradsync

PACKAGE = str(Path(gradsync.__file__).parent)
_INIT = dist.init_process_group


class Lines:
    """Counts lines, or calls of one function, and does something at one of them."""

    def __init__(self, script: str, function: str | None, at: int, act) -> None:
        self.seen, self._script, self._function, self._at, self._act = 0, script, function, at, act

    def start(self) -> None:
        sys.settrace(self._enter)

    def _enter(self, frame, event, _):
        code = frame.f_code
        if self._function is not None:
            if code.co_filename == self._script and code.co_name == self._function:
                self._count()
            return None
        return self._line if code.co_filename.startswith((PACKAGE, self._script)) else None

    def _line(self, frame, event, _):
        if event == "line":
            self._count()
        return self._line

    def _count(self) -> None:
        self.seen += 1
        if self.seen == self._at:
            self._act()


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def main(spec: str, script: str, *options: str) -> None:
    told = json.loads(spec)
    rank = os.environ.get("RANK", "0")
    mine = int(rank) == told.get("rank") and int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) == told.get("attempt", 0)

    ended = threading.Event()  # after that nobody dies: an agent whose finished rank is killed waits for it forever

    def act() -> None:
        if "pause" in told:
            file = Path(told["pause"])
            file.touch()
            while file.exists():
                time.sleep(0.01)
        elif told.get("delay"):
            threading.Thread(target=lambda: ended.wait(told["delay"]) or die(), daemon=True).start()
        else:
            die()

    if "timeout" in told:
        dist.init_process_group = functools.partial(_INIT, timeout=timedelta(seconds=told["timeout"]))
    lines = Lines(script, told.get("function"), told.get("line", 0) if mine else 0, act)
    sys.argv = [script, *options]
    if mine or "count" in told:
        lines.start()
    try:
        runpy.run_path(script, run_name="__main__")
    finally:
        ended.set()
        sys.settrace(None)
        if "count" in told:
            Path(f"{told['count']}-{rank}").write_text(str(lines.seen))


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # where torchrun has forked it; its handler waits for torch to return
    main(*sys.argv[1:])
