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
)
from tests.changes.edits import BY_NAME, HOWS, WRAPS
from tests.changes.rule import LIMIT, exact_or_error
from tests.changes.test_edits import edited, edited_on_one_rank, edited_twice
from tests.changes.test_groups import stores  # noqa: F401 - a fixture
from tests.changes.test_joining import JOINING, SHARED, joining, shared
from tests.changes.test_schedulers import accelerates_scheduler, prepared, updates_seen
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
    hold(ranks, 2, test_middle.gan, [("bare", "both", 3), ("ddp", "d off and on", 1)], only="exact")


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
    cases = [(name, WRAPS[place % 2], ("reset", "exception")[place // 2 % 2]) for place, name in enumerate(test_middle.AFTER)]
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
    for wrap, anew in (("bare", False), ("ddp", False)):
        told = run(test_groups.a_second_group, [f"{one}-{wrap}" for one in stores], "accumulating", wrap, 3, anew, limit=LIMIT)
        exact_or_error(told, only="error" if wrap == "ddp" else "exact")


def test_two_groups_of_one_size_and_bare_sync_gradients(ranks):
    hold(ranks, 2, test_groups.two_groups, [("the same ranks", "accumulating", "sums", [4, 2])])
    hold(ranks, 2, test_groups.accumulated_alone, [("never seen",), ("after a window",)], only="exact")
    hold(ranks, 2, test_groups.some_without, [()])


def test_another_ranks_state(ranks):
    def check(said, wrap, held, whose, when):
        if whose == "its own" or not held:
            assert said == ["", ""], said
        else:
            assert "rank" in said[1] and len(said[1].split()) > 8, said

    each(ranks, 2, test_resume_ranks.interrupted, [
        ("bare", 1, "its own", "before a call"), ("ddp", 2, "its own", "after a call"), ("bare", 1, "rank 0's", "before a call"),
        ("ddp", 1, "the next rank's", "after a call"), ("bare", 0, "rank 0's", "after a call"),
    ], check)  # fmt: skip
    edited_since = [("head", "before a call"), ("fewer layers", "after a call")]
    hold(ranks, 2, test_resume_ranks.edited_since, edited_since, only="error")
    hold(ranks, 2, test_resume_ranks.counts_travel_with_the_state, [()], only="exact")


def test_what_over_draws(ranks):
    def drawn(seen, kind, *_):
        assert all(set(one) <= ({0} if kind == "sized" else {0, 1}) for one in seen), seen

    each(ranks, 2, test_iterables.ahead, [("sized", 7, 3), ("not sized", 7, 3)], drawn)

    def check(seen, lengths, said, _):
        for (calls, error), length, most in zip(seen, lengths, said):
            assert calls == min(length, most) and (length <= most or str(most) in error), seen

    each(ranks, 2, test_iterables.wrong_length, [([8, 8], [6, 6], 3), ([5, 5], [9, 7], 3)], check)
    assert ranks(2).run(test_iterables.gathered_for_metrics, limit=LIMIT) == [list(range(13))] * 2


def test_others_optimizers_and_schedulers(ranks):
    hold(ranks, 2, prepared, [("accelerate", "both", 3), ("fabric", "both", 3), ("accelerate", "optimizer", 1)], only="exact")
    for by_hand, ours in ranks(2).run(accelerates_scheduler, limit=20):
        assert ours == pytest.approx(by_hand) and ours[2] < 0.1


def test_on_update_of_a_rank_that_has_run_out(ranks):
    for one in ranks(2).run(updates_seen, [9, 2], "sized", "bare", limit=20):
        assert one["updates"] == 3 and one["told"] == [(n + 1, n + 1, True) for n in range(3)]


def test_what_is_dropped_is_freed(ranks):
    def nothing(left, *_):
        assert left == [[], []], left

    cases = [(kind, how, [7, 2] if "over" in how else [6, 6]) for kind, how in (
        ("bare", "over"), ("ddp", "sync_every"), ("fsdp1", "over"), ("fsdp2", "over"), ("fsdp2", "sync_every"))]  # fmt: skip
    each(ranks, 2, test_leaks.dropped, cases, nothing)
    each(ranks, 2, test_leaks.last_batch, [("fsdp2",), ("bare",)], nothing)
    each(ranks, 2, test_leaks.at_once, [("bare", "over"), ("ddp", "sized")], nothing)


def test_what_is_used_for_long_grows_by_nothing(ranks):
    def nothing(more, *_):
        assert more == [{}, {}], more

    each(ranks, 2, test_leaks.many_epochs, [("bare", "sync_every", 8), ("fsdp2", "over", 6)], nothing)
    each(ranks, 2, test_leaks.no_function_left, [("bare",)], nothing)
    each(ranks, 2, test_leaks.groups_of_models, [(6,)], nothing)
