"""Random programs of calls, on 1 to 3 real ranks, do what a simple model in float64 says; nobody hangs."""

from __future__ import annotations

import os

from tests.programs.running import run_many

IN_PYTEST = int(os.environ.get("GRADSYNC_PROGRAMS", "250"))


def test_random_programs_do_what_the_model_says(ranks, capsys):
    """Nothing is lost, replicas are equal after each window, counters are right, and each program ends in time."""
    totals = run_many(IN_PYTEST, ranks, None)
    with capsys.disabled():
        print(f"\n{totals}")
    assert totals.programs >= IN_PYTEST * 0.9
