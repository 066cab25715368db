"""A sharded model that is not trained makes ranks run equally many forwards."""

from __future__ import annotations

import pytest

import gradsync
from tests.support.compare import assert_equal_states
from tests.support.homes import home_of
from tests.support.models import net
from tests.support.reference import mean_of
from tests.support.training import data, reference
from gradsync.verify.uneven import EPOCHS, Uneven, windows_of


def a_sharded_teacher_of_ranks_of_unequal_length(engine: str) -> None:
    """Its forward waits for all ranks, even where that of the model which is trained does not; a replay's loss is a NaN."""
    home, teacher, plain = home_of(engine), home_of("fsdp2").model, net()
    other = data(0, 99)  # the teacher has the weights of the model: on other data it says something else
    run, left = Uneven(home), 0

    @gradsync.accumulating(3)
    def step(model, teacher, optimizer, index):
        nonlocal left
        left -= 1
        return mean_of(model(data(home.rank, index)) * teacher(other)) * (1.0 if left >= 0 else float("nan"))

    for lengths in EPOCHS[home.size]:
        left = lengths[home.rank]
        for index in step.over(range(lengths[home.rank])):
            step(home.model, teacher, run.optimizer, index)
        assert -left == max(lengths) - lengths[home.rank], "ranks run equally many forwards"

    def weigh(model, items):
        return sum(mean_of(model(data(*item)) * plain(other).detach()) for item in items) / len(items)

    assert_equal_states(run.states, reference(home, windows_of(EPOCHS[home.size]), weigh))


@pytest.mark.parametrize("engine", ["bare", "ddp", "replicate", "ddp_fsdp2", "fsdp2"])
def test_a_sharded_teacher_of_ranks_of_unequal_length(ranks, engine):
    """Ranks run equally many forwards where any model of the step needs that."""
    ranks(2).run(a_sharded_teacher_of_ranks_of_unequal_length, engine)
