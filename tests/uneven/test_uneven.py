"""Ranks of different lengths where forwards communicate: who has run out repeats its last call, and weighs nothing."""

from __future__ import annotations

import pytest

CASES = "tests.uneven.cases:"
KINDS = ["fsdp2", "fsdp2, root not wrapped", "fsdp1", "fsdp1, not sharded"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("how", ["over", "unsized", "sync_every"])
def test_each_micro_batch_counts_once(ranks, kind, how):
    for lengths in ([3, 7], [8, 2], [1, 5], [4, 4], [6, 3]):
        replays = ranks(2).run(CASES + "uneven", kind, lengths, how)
        assert replays == [max(lengths) - n for n in lengths]


@pytest.mark.parametrize("how", ["over", "sync_every"])
def test_sums_weigh_by_their_counts(ranks, how):
    ranks(2).run(CASES + "uneven", "fsdp2", [3, 7], how, True)


@pytest.mark.parametrize("how", ["over", "sync_every"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_nan_in_a_replay_leaves_no_trace(ranks, how, kind):
    """Its gradients are replaced by zeros at the parameters."""
    ranks(2).run(CASES + "uneven", kind, [7, 2], how, False, True)


def test_loops_that_pass_over_items(ranks):
    ranks(2).run(CASES + "uneven", "fsdp2", [5, 8], "over", False, False, [[0, 1], [1, 7], [1, 2]])
    ranks(2).run(CASES + "uneven", "fsdp2", [5, 8], "over", False, False, [[0, 4], [1, 7], [1, 6], [1, 5]])


@pytest.mark.parametrize("bad", [[[0, 1]], [[1, 2]], [[0, 4], [0, 5]], [[1, 6]]])
def test_skipped_micro_batches(ranks, bad):
    counts = ranks(2).run(CASES + "skipping", "fsdp2", bad)
    assert counts == [[sum(r == rank for r, _ in bad)] * 2 for rank in range(2)]


@pytest.mark.parametrize("how", ["over", "sync_every"])
def test_a_rank_that_never_had_an_item_is_named_on_every_rank(ranks, how):
    for text in ranks(2).run(CASES + "an_empty_rank", "fsdp2", how):
        assert "needs at least one item in" in text and "rank 1 has none" in text, text


@pytest.mark.parametrize("kind", ["fsdp2", "fsdp2, root not wrapped", "fsdp1, not sharded"])
def test_a_sharded_window_is_resumed_with_its_gradients(ranks, kind):
    ranks(2).run(CASES + "resumed", kind)
