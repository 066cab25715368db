"""Random programs of calls, and random stories of participants that change, on 1 to 3 real ranks, against float64."""

from __future__ import annotations

import os

import pytest

from tests.changes.rule import exact_or_error
from tests.programs.running import run_many
from tests.programs.stories import tell
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


def test_a_layer_is_frozen_beside_a_new_one_that_the_users_ddp_has_not(ranks, tmp_path):
    """A story of its own, because it ended a rank: the reducer that is made anew must not take the new layer, too."""
    loop = {"do": "loop", "sized": True, "poison": None}
    story = {
        "number": 1033, "ranks": 2, "wrap": "ddp", "how": "accumulating", "steps": 1, "counts": "number", "scaler": False,
        "hooks": False, "two": False,
        "ops": [
            {**loop, "lengths": [1, 1], "seed": 351}, {"do": "frozen", "rewrap": False},
            {"do": "appended_layer", "rewrap": False}, {**loop, "lengths": [5, 6], "seed": 786},
        ],
    }  # fmt: skip
    exact_or_error(ranks(2).run(tell, story, str(tmp_path / "store")), only="exact")


@pytest.mark.parametrize("how", ["accumulating", "sync_every"])
@pytest.mark.parametrize("size", [2, 3])
def test_two_ddps_that_look_for_unused_parameters_share_layers(ranks, tmp_path, how, size):
    """Each one's reducer takes note of the other one's synchronisations, and a rank that has run out has no gradients."""
    loop = {"do": "loop", "sized": False, "poison": None, "seed": 1, "lengths": [7, 3, 5][:size]}
    story = {
        "number": 1341, "ranks": size, "wrap": "find_unused", "how": how, "steps": 2, "counts": "int64", "scaler": False,
        "hooks": True, "two": False, "ops": [loop, {"do": "joined_by_one_that_shares", "rewrap": False}, loop],
    }  # fmt: skip
    exact_or_error(ranks(size).run(tell, story, str(tmp_path / "store")), only="exact")
