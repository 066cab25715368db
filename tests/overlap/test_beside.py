"""Beside gradients that travel: buffers, dropout, hooks, several functions, models and optimizers, lost ranks, the end."""

from __future__ import annotations

import pytest
import torch

from tests.overlap import beside, leaving
from tests.overlap.decorated import trained
from tests.overlap.loop import Plan, simulate
from tests.overlap.test_truth import even, far


@pytest.mark.parametrize("kind", ["bare", "ddp"])
def test_buffers_leave_before_the_gradients_and_are_in_place_as_the_window_closes(ranks, kind):
    """Also where no gradient leaves before it lands; and the flag of failures keeps nobody waiting."""
    expected = beside.expected_buffers([[(r, 3 * w + i) for r in (0, 1) for i in range(3)] for w in range(4)])
    for states, sent in ranks(2).run(beside.normalised, kind, (12, 12), 2, True):
        assert len(states) == 4
        for one, other in zip(states, expected):
            torch.testing.assert_close(one, other)
        for names in sent[:4]:
            assert names[:2] == ["table", "buffers"] and names[-1] == "failures", names
            assert set(names[2:-1]) == {"gradients"}


@pytest.mark.parametrize("lengths", [(12, 7), (5, 9), (0, 7), (3, 3, 8)])
def test_buffers_of_uneven_ranks(ranks, lengths):
    """Those of the lowest rank that has a micro-batch in the window, equal on all, as without overlap."""
    windows = []
    for start in range(0, max(lengths), 3):
        windows.append([(r, i) for r, n in enumerate(lengths) for i in range(start, min(start + 3, n))])
    expected = beside.expected_buffers(windows)
    for m in (1, 3):
        for states, _ in ranks(len(lengths)).run(beside.normalised, "bare", lengths, m, False):
            for one, other in zip(states[:-1], expected):
                torch.testing.assert_close(one, other)
            torch.testing.assert_close(states[-1], expected[-1])


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_dropout_and_several_optimizers(ranks, num_ranks):
    """A provisional step draws no random number; two optimizers are clipped by one norm and both put back."""
    for m in (1, 2, 3):
        plan = Plan(even(num_ranks), m, "two", 0.3, dropout=0.4)
        for seen in ranks(num_ranks).run(trained, plan):
            assert far(seen, simulate(plan)) < 1e-12


def test_step_hooks_see_true_updates(ranks):
    ranks(2).run(beside.told_to_hooks)


def test_several_functions(ranks):
    ranks(2).run(beside.two_functions)


def test_several_models(ranks):
    ranks(2).run(beside.two_models)


def test_a_copy_in_flight(ranks):
    ranks(2).run(beside.copied_while_travelling)


def test_a_rank_that_is_lost(ranks):
    """The error names what was waited for; parameters stay the last true ones."""
    text = ranks(2).run(beside.lost)[0]
    assert "waited in vain" in text or "did not: " in text


def test_what_still_travels_as_the_group_or_the_program_ends_is_a_warning(tmp_path):
    """Once on each rank; the first time the parameters are put back before the group is gone."""
    for text in leaving.printed(tmp_path):
        for ended in ("as the process group of train_step ended", "as train_step ended"):
            assert text.count(ended) == 1, text
