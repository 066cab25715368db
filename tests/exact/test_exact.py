"""After each boundary the gradients are the mean over all micro-batches of all ranks in the window."""

from __future__ import annotations

import pytest


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("mode", ["over", "unsized", "flush", "sync_every"])
@pytest.mark.parametrize("wrap", ["bare", "ddp"])
def test_every_length_and_window_is_the_float64_mean(ranks, size, mode, wrap):
    """0 to 12 micro-batches in windows of 1 to 6, on 1 to 3 ranks."""
    for steps in range(1, 7):
        assert ranks(size).run("tests.exact.cases:all_lengths", steps, mode, wrap, 12) == [13] * size


UNEVEN = [[5, 3], [3, 5], [1, 9], [9, 1], [4, 8], [8, 7], [1, 1]]


@pytest.mark.parametrize("mode", ["over", "unsized", "sync_every"])
@pytest.mark.parametrize("wrap", ["bare", "ddp", "find_unused", "views", "buckets", "static"])
@pytest.mark.parametrize("kind", ["mean", "sum"])
def test_ranks_with_different_numbers_of_micro_batches(ranks, mode, wrap, kind):
    """Nobody hangs, and each micro-batch and each count weighs once."""
    for lengths in UNEVEN:
        ranks(2).run("tests.exact.cases:uneven", lengths, 4, mode, wrap, kind)
    ranks(3).run("tests.exact.cases:uneven", [3, 7, 5], 3, mode, wrap, kind)


@pytest.mark.parametrize("wrap", ["bare", "ddp", "find_unused", "views"])
def test_a_rank_without_any_micro_batch_takes_part(ranks, wrap):
    """Models and optimizers are known by keyword."""
    for lengths in ([0, 5], [6, 0]):
        ranks(2).run("tests.exact.cases:uneven", lengths, 4, "over", wrap)
    ranks(3).run("tests.exact.cases:uneven", [0, 7, 0], 3, "unsized", wrap, "sum")


@pytest.mark.parametrize("wrap", ["bare", "find_unused"])
@pytest.mark.parametrize("how", ["window", "each", "sync_every", "sync_every plain"])
def test_ranks_that_use_different_models_in_a_window(ranks, wrap, how):
    ranks(2).run("tests.exact.cases:one_of_several", wrap, how)


@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("sync", ["window", "each"])
def test_two_static_graphs_in_one_step(ranks, steps, sync):
    ranks(2).run("tests.exact.cases:static_pair", steps, sync)


@pytest.mark.parametrize("lengths", [[5, 2], [2, 5], [7, 1], [1, 6], [6, 6], [3, 4]])
@pytest.mark.parametrize("sharded", [0, 1])
@pytest.mark.parametrize("nested", [False, True])
def test_a_sharded_model_and_another_in_one_loop(ranks, nested, sharded, lengths):
    for known in (False, True):
        ranks(2).run("tests.exact.cases:sharded_and_not", lengths, nested, sharded, known)


@pytest.mark.parametrize("nested", [False, True])
def test_several_windows_in_one_loop(ranks, nested):
    """Buffers are made equal where each rank can tell, also one that has run out."""
    for lengths in ([5, 2], [2, 5], [4, 9], [7, 7], [1, 8]):
        assert ranks(2).run("tests.exact.cases:several_windows", lengths, nested) == ["exact"] * 2
    for text in ranks(2).run("tests.exact.cases:several_windows", [3, 0], nested):
        unknown = "at different places: rank 0 at the data of body.over; rank 1 at" if nested else "but rank 1 has none"
        assert unknown in text
