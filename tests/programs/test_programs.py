"""Random programs of calls, and random stories of participants that change, on 1 to 3 real ranks, against float64."""

from __future__ import annotations

import os

import pytest

from tests.programs.running import run_many
from tests.programs.telling import run_stories, show

IN_PYTEST = int(os.environ.get("GRADSYNC_PROGRAMS", "250"))


def test_random_programs_do_what_the_model_says(ranks, capsys):
    """Nothing is lost, replicas are equal after each window, counters are right, and each program ends in time."""
    totals = run_many(IN_PYTEST, ranks, None)
    with capsys.disabled():
        print(f"\n{totals}")
    assert totals.programs >= IN_PYTEST * 0.9


@pytest.mark.parametrize("number", [12, pytest.param(400, marks=pytest.mark.slow)])
def test_random_stories_end_exact_or_in_an_error_on_every_rank(ranks, capsys, number):
    """Edits between loops, counts of every dtype, hooks, scalers, threads, sharded models, static graphs, sharing."""
    told = run_stories(number, ranks, 1000, shrink=False)
    with capsys.disabled():
        print(f"\n{told}")
    assert not told.failures, show(told)
    assert told.kinds["exact"] >= number / 2
