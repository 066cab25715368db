"""A window that is saved in its middle goes on and ends as if nothing had been, on every engine."""

from __future__ import annotations

import pytest

from gradsync._state import own_names
from tests.support.homes import HOMES
from tests.resume.engine_states import KINDS

CASES = "tests.resume.engine_states:"
SHARDED = [name for name in HOMES if name.startswith(("fsdp", "hsdp", "replicate_fsdp"))]
FSDP1 = [name for name in HOMES if name.startswith("fsdp1")]


@pytest.mark.parametrize("how", ["over", "flush"])
@pytest.mark.parametrize("engine", HOMES)
def test_a_window_is_resumed_after_any_micro_batch(ranks, engine, how):
    """To the bit as it would have ended, and within rounding as one process in float64 has it."""
    ranks(HOMES[engine][0]).run(CASES + "of_engine", engine, how)


@pytest.mark.parametrize("engine", SHARDED)
def test_a_window_that_synchronises_each_micro_batch_is_resumed(ranks, engine):
    """This rank's pieces of what is reduced already."""
    ranks(HOMES[engine][0]).run(CASES + "of_engine", engine, "flush", "each")


@pytest.mark.parametrize(
    ("engine", "sync"),
    [*((one, None) for one in SHARDED), *((one, "each") for one in FSDP1)],
)
def test_what_only_earlier_micro_batches_used_is_not_lost(ranks, engine, sync):
    """And what nobody used gets no gradient by being saved."""
    ranks(HOMES[engine][0]).run(CASES + "used_only_early", engine, sync)


@pytest.mark.parametrize("engine", ["bare", "replicate_fsdp", *FSDP1, "fsdp2", "hsdp_window"])
def test_a_state_holds_whole_gradients_by_name(ranks, engine):
    """As plain tensors, which a live function takes back as well."""
    ranks(HOMES[engine][0]).run(CASES + "whole_by_name", engine)


@pytest.mark.parametrize("engine", HOMES)
def test_one_rank_alone_asks_for_a_state(ranks, engine):
    """After an evaluation, which may leave parameters gathered: it has their names, and no rank waits for that one."""
    ranks(HOMES[engine][0]).run(CASES + "asked_on_one_rank", engine, limit=30)


def test_a_state_goes_by_the_names_in_the_users_model(ranks):
    """Whatever wraps it, and the modules in it."""
    ranks(2).run(CASES + "names_in_wrappers")


def test_two_parameters_never_have_one_name():
    """Where they would, without their wrappers, both keep what they have."""
    names = ["a._orig_mod.b", "a.b", "_fsdp_wrapped_module.c", "my_orig_mod.d", "e._orig_mod", "f._checkpoint_wrapped_module.g"]
    assert list(own_names(names).values()) == ["a._orig_mod.b", "a.b", "c", "my_orig_mod.d", "e._orig_mod", "f.g"]


@pytest.mark.parametrize(
    "engine", [*(one for one in FSDP1 if one != "fsdp1_no_root"), "fsdp2", "replicate_fsdp", "hsdp_window", "hsdp_shard"]
)
def test_what_was_loaded_is_reduced_without_a_forward(ranks, engine):
    ranks(HOMES[engine][0]).run(CASES + "reduced_without_a_forward", engine)


def test_under_shard_a_state_holds_a_piece_of_each(ranks):
    """Of the sum over the ranks that share the shards."""
    ranks(4).run(CASES + "parts_of_an_hsdp_mesh")


def test_which_parameters_were_used_is_not_forgotten(ranks):
    """By some rank or by none, and with a gradient of zeros."""
    ranks(4).run(CASES + "who_used_what")


def test_a_piece_of_another_shard_is_refused(ranks):
    ranks(4).run(CASES + "other_shards")


@pytest.mark.parametrize(
    ("engine", "before", "after"),
    [
        *(("hsdp_window", a, b) for a in ("window", "shard", "each") for b in ("window", "shard", "each") if a != b),
        *((one, *pair) for one in ("fsdp1_full", "fsdp1_full_orig", "fsdp2") for pair in (("window", "each"), ("each", "window"))),
    ],
)  # fmt: skip
def test_a_state_of_another_sync(ranks, engine, before, after):
    """Is gone on with; while it is mixed, saving it is an error."""
    ranks(HOMES[engine][0]).run(CASES + "another_sync", engine, before, after)


@pytest.mark.parametrize("sync", [None, "each"])
@pytest.mark.parametrize("kind", KINDS)
def test_shapes_types_and_places(ranks, kind, sync):
    """Sizes that nothing divides, shared and frozen parameters, bfloat16, offloading, other meshes and dimensions."""
    ranks(KINDS[kind][0]).run(CASES + "of_kind", kind, sync)
