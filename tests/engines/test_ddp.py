"""DDP in every configuration, on real ranks, against a float64 reference or the loop by hand."""

from __future__ import annotations

import pytest

CASES = "tests.engines.ddp_cases:"


@pytest.mark.parametrize("how", ["bare", "bare over", "ddp", "ddp over", "bare sync_every", "ddp sync_every"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_whole_windows_are_bitwise_the_loop_by_hand(ranks, how, dtype):
    for config in ("default",) if how.startswith("bare") else ("default", "find_unused", "views", "buckets"):
        for make in ("small", "buffers"):
            ranks(2).run(CASES + "bitwise", config, make, dtype, how)
    ranks(3).run(CASES + "bitwise", "default", "small", dtype, how)


@pytest.mark.parametrize("lengths", [[7, 7], [5, 8], [8, 2]])
@pytest.mark.parametrize(
    "name",
    [
        "static", "static unused", "reentrant", "not reentrant", "static reentrant", "sparse", "ddp of compiled",
        "compiled ddp", "inside", "partly inside", "several", "bypassed", "two forwards",
    ],
)  # fmt: skip
def test_ddp_scenarios(ranks, name, lengths):
    ranks(2).run(CASES + "scenario", name, "ddp", lengths)


@pytest.mark.parametrize("lengths", [[7, 7], [5, 8], [8, 2]])
@pytest.mark.parametrize(
    "name", ["reentrant", "not reentrant", "sparse", "compiled bare", "method", "sub-module", "two forwards"]
)
def test_bare_scenarios(ranks, name, lengths):
    """However the body reaches the parameters, the boundary synchronises them."""
    ranks(2).run(CASES + "scenario", name, "bare", lengths)


@pytest.mark.parametrize(
    ("wrap", "forwards"),
    [
        ("plain", 0), ("overridden", 3), ("find_unused", 3), ("static", 3), ("joining", 3), ("compiled", 3),
        ("compiled inside", 3),
    ],
)  # fmt: skip
def test_ddps_own_forward_runs_where_it_adds_something(ranks, wrap, forwards):
    assert ranks(2).run(CASES + "forwards", wrap) == [(forwards, 3)] * 2


@pytest.mark.parametrize("size", [1, 2])
def test_gradients_that_the_user_drops(ranks, size):
    ranks(size).run(CASES + "dropped_by_the_user")
    ranks(size).run(CASES + "dropped_by_a_backward")


def test_one_rank_on_ddp(ranks):
    for what in ("plain", "hook", "late hook"):
        assert ranks(1).run(CASES + "alone", what) == ["equal"]
    assert "must be used in each window" in ranks(1).run(CASES + "alone", "unused")[0]


@pytest.mark.parametrize(
    "config", [{}, {"gradient_as_bucket_view": True}, {"find_unused_parameters": True}, {"static_graph": True}]
)
def test_two_backwards_that_take_the_same_time(ranks, config):
    ranks(2).run(CASES + "same_times", config)


@pytest.mark.parametrize("name", ["hook", "static", "views"])
def test_flush_goes_through_the_reducer(ranks, name):
    ranks(2).run(CASES + "flush_scenario", name)


@pytest.mark.parametrize(
    "case",
    [
        "collectives", "buffers", "unused_sometimes", "a_gan", "an_inf_on_one_rank", "sync_gradients_alone",
        "no_sync_everywhere", "endless_sync_every",
    ],
)  # fmt: skip
def test_on_two_ranks(ranks, case):
    ranks(2).run(CASES + case)


def test_collectives_of_three_ranks(ranks):
    ranks(3).run(CASES + "collectives")


def test_a_compression_hook_survives_a_new_reducer(ranks):
    ranks(2).run(CASES + "compressed", "builtin")


@pytest.mark.parametrize("wrap", ["bare", "ddp"])
def test_parameters_frozen_and_unfrozen_during_training(ranks, wrap):
    ranks(2).run(CASES + "freezing", wrap)


@pytest.mark.parametrize("wrap", ["bare", "ddp"])
def test_dropping_model_and_optimizer_frees_the_engine(ranks, wrap):
    ranks(2).run(CASES + "freed", wrap)


def test_a_parameter_that_ddp_finds_unused_is_an_error_on_every_rank(ranks):
    for text in ranks(2).run(CASES + "unused_in_ddp"):
        assert "no micro-batch of the window used unused" in text and "find_unused_parameters=True" in text


def test_a_sub_group(ranks):
    ranks(3).run(CASES + "sub_group")


@pytest.mark.parametrize("policy", ["skip", "raise"])
def test_nonfinite_acts_on_every_rank_alike(ranks, policy):
    said = ranks(2).run(CASES + "nonfinite_on_one_rank", policy)
    assert [len(one) for one in said] == ([1, 1] if policy == "raise" else [0, 0])


@pytest.mark.parametrize("how", ["break", "return", "exception"])
def test_leaving_sync_every(ranks, how):
    ranks(2).run(CASES + "leaving_sync_every", how)


@pytest.mark.parametrize("where", [0, 1, 2])
@pytest.mark.parametrize("fails", [[0], [1], [0, 1]])
def test_a_failing_boundary_completes_its_collectives(ranks, where, fails):
    """It fails in the middle, at the very first gradient, or after the last; before buckets are ordered, and after."""
    ranks(2).run(CASES + "failing_backward", where, fails)


@pytest.mark.parametrize("where", [0, 2])
@pytest.mark.parametrize("fails", [[0], [1], [0, 1]])
def test_a_boundary_of_the_users_own_that_fails(ranks, where, fails):
    for sized in (True, False):
        ranks(2).run(CASES + "failing_plain_backward", where, fails, sized)


@pytest.mark.parametrize("bad", [[[0, 1]], [[1, 2]], [[0, 2], [1, 5]], [[0, 0], [0, 1], [0, 2]], [[1, 7]], [[0, 6], [0, 7]]])
def test_skipped_micro_batches(ranks, bad):
    ranks(2).run(CASES + "skipping", bad)


@pytest.mark.parametrize("bad", [[0, 0], [1, 1], [0, 2], [1, 5], [1, 6]])
def test_a_skipped_type_out_of_a_backward_drops_the_window_everywhere(ranks, bad):
    ranks(2).run(CASES + "spoiled", bad)


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("steps", ["same steps", "rank 0 has 2", "rank 1 has 3"]),
        ("steps later", ["same number of steps in a window", "rank 0 has 2", "rank 1 has 3"]),
        ("tail", ["same tail", "rank 0 has step", "rank 1 has drop"]),
        ("loss", ["same kind of loss", "rank 0 has a mean", "rank 1 has a LossSum"]),
        ("parameters", ["same trainable parameters", "rank 0 has 2 of 8", "rank 1 has 2 of 12"]),
    ],
)
def test_disagreement_is_told_on_every_rank(ranks, what, words):
    said = ranks(2).run(CASES + "disagreement", what)
    if what == "steps later":
        said += ranks(2).run(CASES + "disagreement", what, True)
    for text in said:
        assert all(word in text for word in words), text


def test_a_rank_without_items_and_without_models_is_named_everywhere(ranks):
    for flush in (False, True):
        for text in ranks(2).run(CASES + "empty_rank_unknown", False, flush):
            assert "rank 1 had none" in text and "model=..." in text, text
        assert ranks(2).run(CASES + "empty_rank_unknown", True, flush) == ["no error"] * 2


@pytest.mark.parametrize("wrap", ["bare", "ddp"])
def test_a_rank_that_flushes_before_any_call(ranks, wrap):
    ranks(2).run(CASES + "flushing_an_empty_rank", wrap)
