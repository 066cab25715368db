"""Nothing of an iteration that failed is left in a sharded engine."""

from __future__ import annotations

import contextlib

import pytest

from gradsync.engines import find
from tests.support.homes import Home, home_of
from tests.support.models import second_block
from tests.support.training import Run
from tests.support.wire import Wire


def idle(home: Home) -> bool:
    """Whether FSDP is between two iterations."""
    for engine in find([home.model]):
        for state in getattr(engine, "_states", ()):
            if state._training_state.name != "IDLE" or state._state_ctx.post_backward_final_callback_queued:
                return False
        for module in getattr(engine, "_instances", ()):
            if module.training_state.name != "IDLE" or getattr(module, "_post_backward_callback_queued", False):
                return False
    return True


def after_an_exception(engine: str) -> None:
    """Wherever it struck, the next window is sent as the last one was."""
    home = home_of(engine)
    run = Run(home)
    second = second_block(home.model)

    def window():
        wire = Wire()
        for index in range(3):
            run(index)
        return wire.look()

    window()
    usual = window()
    for where in ("forward", "backward"):
        for at in (1, 2):
            for index in range(at + 1):
                second.fails = where if index == at else ""
                with pytest.raises(ArithmeticError) if index == at else contextlib.nullcontext():
                    run(index)
            second.fails = ""
            assert idle(home), (where, at)
            assert window() == usual, (where, at)


FSDP2 = ["fsdp2", "fsdp2_gathered", "replicate_fsdp"]


@pytest.mark.parametrize("engine", ["fsdp1_full", "fsdp1_full_orig", "fsdp1_grad_op", "fsdp1_no_shard_orig", *FSDP2])
def test_the_window_after_an_exception(ranks, engine):
    """Nothing of the iteration that failed is left in the engine."""
    ranks(2).run(after_an_exception, engine)
