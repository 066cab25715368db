"""One story of each kind in this directory, on two ranks: the part of it that a plain pytest runs."""

from __future__ import annotations

import pytest

from tests.changes import (
    test_groups,
    test_iterables,
    test_leaks,
    test_middle,
    test_middle_of_shards,
    test_outside,
    test_resume_ranks,
    test_schedulers,
)
from tests.changes.edits import BY_NAME, HOWS, WRAPS
from tests.changes.rule import LIMIT, exact_or_error
from tests.changes.test_edits import edited, edited_on_one_rank, edited_twice
from tests.changes.test_groups import stores  # noqa: F401 - a fixture
from tests.changes.test_joining import JOINING, SHARED, joining, shared
from tests.changes.together import each, hold


def in_turn(names, hows=HOWS, wraps=WRAPS) -> list[tuple]:
    """Each name with the bare model and the decorator, and with another way and wrapper, whose turn it is."""
    ways = [(how, wrap) for how in hows for wrap in wraps if (how, wrap) != ("accumulating", "bare")]
    return [case for place, name in enumerate(names)
            for case in ((name, "accumulating", "bare", 3), (name, *ways[place % len(ways)], 3))]  # fmt: skip


def test_an_edit_between_windows(ranks):
    hold(ranks, 2, edited, in_turn(BY_NAME))
    hold(ranks, 2, edited_twice, [(("new_head", "appended_layer", "weight_norm", "copied"), "accumulating", "bare")])


def test_an_edit_on_one_rank_alone(ranks, tmp_path):
    hold(ranks, 2, edited_on_one_rank, [("new_head", "accumulating", "bare", str(tmp_path / "store"))], only="error")
    # What watches a loop lets go of autograd's nodes at once: a parameter that is resized in place needs new ones.
    hold(ranks, 1, edited, [("resized_in_place", how, "bare", 3) for how in HOWS], only="exact")


def test_an_edit_in_the_middle_of_a_window(ranks):
    cases = [(name, "accumulating", WRAPS[place % 2], 1 + place % 2) for place, name in enumerate(test_middle.MIDDLE)]
    cases += [("assigned", "accumulating", wrap, 1) for wrap in WRAPS]
    hold(ranks, 2, test_middle.edited_in_the_middle, cases, says="window|middle", only="error")
    hold(ranks, 2, test_middle.edited_in_the_middle, [("new_head", "sync_every", "bare", 1), ("frozen", "sync_every", "ddp", 1)])
    hold(ranks, 2, test_middle.gan, [("bare", test_middle.both, 3), ("ddp", test_middle.d_off_and_on, 1)], only="exact")


def test_an_edit_of_shards_in_the_middle_of_a_window(ranks):
    shards = test_middle_of_shards
    engines = [*shards.FSDP1, *shards.FSDP2]
    cases = [(engines[(place + turn) % len(engines)], name, "accumulating", 4 + turn % 2)
             for place, name in enumerate(shards.EDITS) for turn in range(0, 6, 3)]  # fmt: skip
    cases += [(engine, "a_layer_more", "sync_every", 4) for engine in shards.FSDP2]
    hold(ranks, 2, shards.edited, cases, says="middle", only="error")
    likes = ["", "bare root", *shards.LIKE]
    cases = [((*engine, likes[(place + turn) % len(likes)]), name, HOWS[::2][turn % 2], 4)
             for turn, name in enumerate(shards.NO_EDITS) for place, engine in enumerate(shards.FSDP1)
             if engine not in shards.NOT_OFFLOADED or likes[(place + turn) % len(likes)] != "offloaded"]  # fmt: skip
    hold(ranks, 2, shards.not_edited, cases, only="exact")


def test_reset_exceptions_and_states_after_an_edit(ranks):
    give_ups = (test_middle.reset, test_middle.exception)
    cases = [(name, WRAPS[place % 2], give_ups[place // 2 % 2]) for place, name in enumerate(test_middle.AFTER)]
    hold(ranks, 2, test_middle.after_an_edit, cases)
    hold(ranks, 2, test_middle.saved_after_an_edit, [(name, WRAPS[place % 2]) for place, name in enumerate(test_middle.AFTER)])


def test_who_joins_later_and_models_that_share(ranks):
    hold(ranks, 2, joining, in_turn(JOINING))
    hold(ranks, 2, shared, in_turn(SHARED, HOWS[::2]))


def test_what_the_optimizers_step_and_no_model_has(ranks):
    hold(ranks, 2, test_outside.outside, in_turn(test_outside.OUTSIDE, HOWS[:2]), says="parameter|optimizer")
    hold(ranks, 2, test_outside.left_out, [("bare", 3), ("ddp", 1)])


def test_optimizers_and_models_made_anew(ranks):
    hold(ranks, 2, test_outside.optimizers_made_anew, [("bare", 1), ("ddp", 3)], only="exact")
    hold(ranks, 2, test_outside.models_made_anew, [("bare",)], only="exact")


def test_groups_that_come_and_go(ranks, stores):  # noqa: F811
    run = ranks(2).run
    exact_or_error(run(test_groups.alone_first, stores[:], "accumulating", "bare", 3, limit=LIMIT), only="exact")
    exact_or_error(run(test_groups.with_process_group, test_groups.free_ports(6), "sync_every anew", limit=LIMIT), only="exact")
    for wrap, only in (("bare", "exact"), ("ddp", "error")):
        told = run(test_groups.a_second_group, [f"{one}-{wrap}" for one in stores], "accumulating", wrap, 3, False, limit=LIMIT)
        exact_or_error(told, only=only)


def test_two_groups_of_one_size_and_bare_sync_gradients(ranks):
    groups = test_groups
    hold(ranks, 2, groups.two_groups, [(groups.the_same_ranks, groups.by_function, groups.Sums, [4, 2])])
    hold(ranks, 2, groups.accumulated_alone, [(groups.never_seen,), (groups.after_a_window,)], only="exact")
    hold(ranks, 2, groups.some_without, [()])


def test_another_ranks_state(ranks):
    states = test_resume_ranks

    def nothing(said, *_):
        assert said == ["", ""], said

    def refused(said, *_):
        assert "rank" in said[1] and len(said[1].split()) > 8, said

    each(ranks, 2, states.interrupted, [
        ("bare", 1, states.its_own, False), ("ddp", 2, states.its_own, True), ("bare", 0, states.rank_0s, True)], nothing)  # fmt: skip
    each(ranks, 2, states.interrupted, [("bare", 1, states.rank_0s, False), ("ddp", 1, states.the_next_ranks, True)], refused)
    hold(ranks, 2, states.edited_since, [(states.another_head, False), (states.fewer_layers, True)], only="error")
    hold(ranks, 2, states.counts_travel_with_the_state, [()], only="exact")


def test_what_over_draws(ranks):
    for kind, drawn_ahead in ((test_iterables.Sized, {0}), (test_iterables.Drawn, {0, 1})):
        for one in ranks(2).run(test_iterables.ahead, kind, 7, 3, limit=LIMIT):
            assert set(one) <= drawn_ahead

    def check(seen, lengths, said, _):
        for (calls, error), length, most in zip(seen, lengths, said):
            assert calls == min(length, most) and (length <= most or str(most) in error), seen

    each(ranks, 2, test_iterables.wrong_length, [([8, 8], [6, 6], 3), ([5, 5], [9, 7], 3)], check)
    assert ranks(2).run(test_iterables.gathered_for_metrics, limit=LIMIT) == [list(range(13))] * 2


def test_others_optimizers_and_schedulers(ranks):
    theirs = test_schedulers
    cases = [(theirs.accelerate, theirs.both, 3), (theirs.lightning, theirs.both, 3), (theirs.accelerate, theirs.optimizer_alone, 1)]
    hold(ranks, 2, theirs.prepared, cases, only="exact")
    for by_hand, ours in ranks(2).run(theirs.accelerates_scheduler, limit=20):
        assert ours == pytest.approx(by_hand) and ours[2] < 0.1


def test_on_update_of_a_rank_that_has_run_out(ranks):
    for one in ranks(2).run(test_schedulers.updates_seen, [9, 2], list, "bare", limit=20):
        assert one["updates"] == 3 and one["told"] == [(n + 1, n + 1, True) for n in range(3)]


def test_what_is_dropped_is_freed(ranks):
    def nothing(left, *_):
        assert left == [[], []], left

    leaks = test_leaks
    cases = [
        (leaks.bare, leaks.over, [7, 2]), (leaks.ddp, leaks.sync_every_without_batches, [6, 6]),
        (leaks.fsdp1, leaks.over, [7, 2]), (leaks.fsdp2, leaks.over, [7, 2]),
        (leaks.fsdp2, leaks.sync_every_without_batches, [6, 6]),
    ]  # fmt: skip
    each(ranks, 2, leaks.dropped, cases, nothing)
    each(ranks, 2, leaks.last_batch, [(leaks.fsdp2,), (leaks.bare,)], nothing)
    each(ranks, 2, leaks.at_once, [(leaks.bare, leaks.over), (leaks.ddp, leaks.sync_every)], nothing)


def test_what_is_used_for_long_grows_by_nothing(ranks):
    def nothing(more, *_):
        assert more == [{}, {}], more

    leaks = test_leaks
    each(ranks, 2, leaks.many_epochs, [(leaks.bare, leaks.sync_every, 8), (leaks.fsdp2, leaks.over, 6)], nothing)
    each(ranks, 2, leaks.no_function_left, [(leaks.bare,)], nothing)
    each(ranks, 2, leaks.groups_of_models, [(6,)], nothing)
