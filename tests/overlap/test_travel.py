"""The communication hook: neutral to the bit outside of overlap, and in it the mean lands later."""

from __future__ import annotations

import pytest

from tests.overlap import cases


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("config", cases.DDPS)
def test_the_hook_does_what_ddp_does_to_the_bit(ranks, num_ranks, dtype, config):
    """With it and without, over held micro-batches, and around windows that travel; these arrive as the same bits."""
    ranks(num_ranks).run(cases.neutral, config, dtype)


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_compressed_gradients_travel_in_bfloat16_and_flags_do_not(ranks, num_ranks, dtype):
    ranks(num_ranks).run(cases.compressed, dtype)


def test_compressed_without_overlap_is_torchs_own_hook(ranks):
    ranks(2).run(cases.compressed_at_once)


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_sparse_gradients_travel(ranks, num_ranks):
    ranks(num_ranks).run(cases.sparse)


def test_a_ddp_with_the_hook_pickles_and_copies(ranks):
    ranks(2).run(cases.pickles)


def test_a_hook_of_somebody_elses_is_named(ranks):
    for texts in ranks(2).run(cases.hooks_of_others):
        assert "allreduce_hook" in texts[0] and "ALLREDUCE" in texts[1]
        assert all("of which torch takes one" in text and "Leave that hook out" in text for text in texts)


def test_a_landed_gradient_that_somebody_keeps_keeps_its_values(ranks):
    ranks(2).run(cases.kept_gradients)
