"""From a program to what each rank does and has to see.

A program is plain data (dicts, lists, numbers), as `programs()` in draw.py draws it. `written(program)` goes through it,
leaves out what the contract does not allow where it stands, and writes down for each rank

- a script: the calls that this rank makes, and nothing else;
- what must be seen after each of its actions.
"""

from __future__ import annotations

from tests.programs import do_calls, do_over, do_states, do_sync
from tests.programs.model import Model

ACTIONS = {
    "calls": do_calls.do_calls,
    "boundary_fails": do_calls.do_boundary_fails,
    "clash": do_calls.do_clash,
    "over": do_over.do_over,
    "flush": do_states.do_flush,
    "reset": do_states.do_reset,
    "save": do_states.do_save,
    "load": do_states.do_load,
    "resume": do_states.do_resume,
    "cross": do_states.do_cross,
    "sync": do_sync.do_sync,
}


def written(program: dict) -> Model:
    """The model after the program, with scripts and expectations."""
    model = Model(program)
    for op in program["ops"]:
        if not model.ended:
            ACTIONS[op["do"]](model, op)
        if op.get("then") and not model.ended:  # right after it, for what it has left open
            f = 1 - op["f"] if op["then"] == "reset_other" else op["f"]
            ACTIONS[op["then"].partition("_")[0]](model, {"f": f, "slot": 0, "torn": False, "all": True})
    return model
