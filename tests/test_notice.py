"""Windows that are not as planned: every rank hears of the first in time, and until then nothing is sent.

How many collectives that saves is counted in test_ddp.py.
"""

from __future__ import annotations

import pytest

CASES = "tests.cases_notice:"
WRAPS = ["bare", "ddp"]


@pytest.mark.parametrize("wrap", WRAPS)
@pytest.mark.parametrize("how", ["over", "sync_every"])
def test_loops_that_pass_over_items(ranks, wrap, how):
    ranks(2).run(CASES + "passing_over", wrap, how)


@pytest.mark.parametrize("wrap", WRAPS)
@pytest.mark.parametrize("how", ["over", "sync_every"])
@pytest.mark.parametrize(
    ("said", "true"), [([8, 8], [5, 8]), ([3, 8], [8, 8]), ([8, 6], [8, 9]), ([5, 5], [8, 8]), ([9, 9], [9, 1])]
)
def test_lengths_that_are_wrong(ranks, wrap, how, said, true):
    ranks(2).run(CASES + "wrong_lengths", wrap, how, said, true)


@pytest.mark.parametrize("wrap", WRAPS)
def test_a_rank_that_calls_twice_an_item(ranks, wrap):
    ranks(2).run(CASES + "calls_twice", wrap)


@pytest.mark.parametrize("wrap", WRAPS)
def test_a_loop_that_is_left_early(ranks, wrap):
    ranks(2).run(CASES + "left_early", wrap)


@pytest.mark.parametrize("wrap", WRAPS)
def test_a_rank_that_fails_as_another_gives_notice(ranks, wrap):
    assert ranks(2).run(CASES + "failing_as_another_gives_notice", wrap) == ["", "division by zero"]


@pytest.mark.parametrize("wrap", WRAPS)
def test_a_kind_of_loss_that_changes_on_one_rank(ranks, wrap):
    for text in ranks(2).run(CASES + "kinds_that_change", wrap):
        assert text.startswith("after 1 updates") and "rank 0 returned a mean, rank 1 returned a LossSum" in text


@pytest.mark.parametrize("wrap", WRAPS)
def test_a_store_that_cannot_be_copied(ranks, wrap):
    ranks(2).run(CASES + "a_store_of_ones_own", wrap)
