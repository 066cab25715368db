"""What comes in between while gradients travel: exceptions, states, other functions, on real ranks; and `compress`."""

from __future__ import annotations

import pytest
import torch

import gradsync
from tests.overlap import events
from tests.overlap.decorated import trained
from tests.overlap.loop import Plan, simulate
from tests.overlap.test_truth import even, far


def test_micro_batches_that_are_skipped_weigh_nothing(ranks):
    """At the boundary too; and a rank all of whose micro-batches are dropped goes on from true parameters."""
    broken = ((0, 1), (1, 5), (0, 6), (0, 7), (0, 8))
    for m in (1, 3):
        plan = Plan(even(2), m, broken=broken)
        expected = simulate(plan)
        for seen in ranks(2).run(trained, plan):
            assert far(seen, expected) < 1e-12


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_windows_that_are_not_finite_make_no_update(ranks, num_ranks):
    for m in (1, 2, 3):
        plan = Plan(even(num_ranks), m, "adamw", infinite=((1, 4), (0, 9)))
        expected = simulate(plan)
        assert len(expected) == 3
        for seen in ranks(num_ranks).run(trained, plan):
            assert far(seen, expected) < 1e-12


def test_a_run_repeats_bit_by_bit_and_ranks_are_equal(ranks):
    plan = Plan(((3, 3), (3, 3), (2, 3), (0, 3)), 2, "adamw", 0.3, dtype="float32", compress=True)
    one, two = (ranks(2).run(trained, plan) for _ in range(2))
    assert all(events.same(a, b) for seen in (*one, *two) for a, b in zip(seen, one[0], strict=True))


def test_after_an_exception_parameters_are_the_last_true_ones(ranks):
    ranks(2).run(events.goes_back_and_lands_at_the_next_call)


def test_what_settles(ranks):
    ranks(2).run(events.settling)


def test_a_state_from_the_middle_of_a_window_goes_on_to_the_bit(ranks):
    ranks(2).run(events.resumed)


def test_another_function_on_the_same_parameters_begins_from_true_ones(ranks):
    ranks(2).run(events.two_functions)


def test_updates_are_told_of_when_they_land(ranks):
    """After the second micro-batch of the next window, and after flush."""
    for told in ranks(2).run(events.told_when_landed):
        assert told == [(i, max(0, (i - 1) // 3), max(0, (i - 1) // 3)) for i in range(9)] + [(9, 3, 3)]


@pytest.mark.parametrize("m", [1, 3])
def test_on_update_saves_the_true_parameters(ranks, m):
    ranks(2).run(events.saves_in_on_update, m)


@pytest.mark.parametrize("m", [1, 3])
def test_a_loop_that_ends_late_leaves_the_next_one_alone(ranks, m):
    ranks(2).run(events.closes_late, m)


UNEQUAL = [(7, 7), (7, 4), (4, 7), (8, 2)]


@pytest.mark.parametrize("lengths", UNEQUAL)
@pytest.mark.parametrize("m", [1, 2, 3])
def test_a_flush_in_on_update_is_an_error(ranks, m, lengths):
    for said in ranks(2).run(events.flushes_in_on_update, m, lengths):
        assert "in an on_update" in said


@pytest.mark.parametrize("lengths", UNEQUAL)
@pytest.mark.parametrize("m", [1, 2, 3])
def test_what_on_update_sends_meets_that_of_the_other_ranks(ranks, m, lengths):
    for known in (True, False):
        ranks(2).run(events.collectives_in_on_update, m, lengths, known)


@pytest.mark.parametrize("lengths", UNEQUAL)
@pytest.mark.parametrize("m", [1, 2, 3])
def test_a_window_that_is_not_finite_raises_on_every_rank(ranks, m, lengths):
    for said in ranks(2).run(events.raises_where_it_is_not_finite, m, lengths):
        assert "must be finite" in said


def test_a_write_to_provisional_parameters_is_an_error(ranks):
    for text in ranks(2).run(events.a_write_is_an_error):
        assert "extra was written to" in text and "settle()" in text


def test_what_still_travels_as_the_function_ends_is_a_warning(ranks):
    for told in ranks(2).run(events.left_behind):
        assert len(told) == 1 and "still travelling" in told[0] and "settle()" in told[0]


def test_a_model_that_goes_while_gradients_travel_is_freed(ranks):
    assert ranks(2).run(events.dropped) == [{"<lambda>": True, "DistributedDataParallel": True}] * 2


def test_on_one_rank_nothing_travels(ranks):
    assert ranks(1).run(events.alone) == [0]


@pytest.mark.parametrize(("m", "at"), [(0, 3), (1, 4), (2, 5)])
def test_an_update_counts_whose_scheduler_failed(ranks, m, at):
    """As without overlap."""
    for raised, numbers, last in ranks(2).run(events.a_scheduler_that_raises, m):
        assert raised == [at] and numbers[at] == (2, 0) and last == (4, 0)


def test_a_ddp_of_the_users_overlaps_alike(ranks):
    ranks(2).run(events.on_a_ddp_of_the_users)


def test_a_learning_rate_that_is_set_in_flight_is_that_at_landing(ranks):
    ranks(2).run(events.a_rate_of_the_users)


def test_without_overlap_no_line_of_it_runs(ranks):
    for files in ranks(2).run(events.without_overlap):
        assert any("gradsync/decorator/updater" in file for file in files)
        assert not [file for file in files if "gradsync/overlap/" in file or file.endswith("decorator/late_updater.py")]


def test_where_it_cannot_be_is_a_sentence(ranks):
    for texts in ranks(2).run(events.refused):
        assert "_Replicated" in texts["replicate"] and "overlap=0" in texts["replicate"]
        assert "find_unused_parameters=True" in texts["find_unused"]
        assert "static_graph=True" in texts["static"]
        assert "compressed_mean" in texts["hook"]
        assert "GradScaler" in texts["scaler"]
        for name in ("compress", "compress and overlap"):
            assert 'gradsync.ddp(model, compress="bf16")' in texts[name]
        assert "overlap" in texts["differing"] and "rank 1" in texts["differing"]
    for options, error in (
        ({"overlap": -1}, ValueError),
        ({"overlap": 3}, ValueError),
        ({"overlap": True}, TypeError),
        ({"overlap": 1, "sync": "each"}, ValueError),
        ({"compress": "fp16"}, ValueError),
    ):
        with pytest.raises(error):
            gradsync.accumulating(2, **options)


@pytest.mark.parametrize("m", [1, 2, 3])
def test_the_audit_finds_no_fault_in_it(ranks, m):
    for found in ranks(2).run(events.audited, m):
        assert found == {"syncs": 4, "updates": 4, "backwards": 12, "missed": 0, "wasted": 0, "discarded": 0}


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("overlap", [0, 1])
def test_compressed_gradients_are_those_of_bfloat16(ranks, num_ranks, overlap):
    for dtype in ("float32", "float64"):
        for worst in ranks(num_ranks).run(events.compressed, overlap, dtype):
            assert 1e-5 < worst < 2**-7


def test_the_hook_compresses_nothing_for_others(ranks):
    ranks(2).run(events.not_compressed_afterwards)


def test_flags_travel_as_they_are(ranks):
    both = {torch.bfloat16, torch.float64}
    assert ranks(2).run(events.flags_are_not_cast) == [[set(), both]] * 2


def test_on_one_rank_it_does_nothing():
    plan = Plan(even(1), 2, "adamw")
    assert far(trained(plan), simulate(Plan(even(1), 0, "adamw"))) < 1e-12
