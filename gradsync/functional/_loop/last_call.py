"""Whether a call is the last of this rank's data, and closes its window."""

from __future__ import annotations

from gradsync.functional._loop.knowledge import LoopKnowledge
from gradsync.functional._loop.lockstep_of_forwards import hear_of_call
from gradsync.functional._window.run import Run
from gradsync.functional._window.terms import ends_with_data
from gradsync.functional._window.window import Window


def is_last_call(loop: LoopKnowledge, run: Run, window: Window) -> bool:
    """Whether the call of `run` that begins closes its open window, because the data ends with it."""
    if loop.is_in_lockstep:
        ends = not any(share.left for share in hear_of_call(loop, run, window.size))
    else:
        # With several runs, this rank cannot know whose window closes next: its last call closes none, and after its
        # data it asks the others. If all have equally many items, each closes its own.
        ends = not loop.data.left(run) and (loop.is_even or loop.only_run is not None)
    return ends and ends_with_data(run.terms.tail)
