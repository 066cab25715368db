"""A model that is edited between windows: exact, or an error on every rank."""

from __future__ import annotations

from datetime import timedelta
from itertools import product

import pytest
import torch.distributed as dist

from tests.changes.edits import BY_NAME, HOWS, WRAPS, tolerance
from tests.changes.rule import Outcome, Run, told
from tests.changes.together import hold
from tests.support.ranks import GROUP_TIMEOUT


def edited(name: str, how: str, wrap: str, steps: int, rewrapped: bool = False) -> Outcome:
    def story(run: Run) -> None:
        run.train()
        BY_NAME[name](run)
        if rewrapped:
            run.rewrap()
        run.train()

    return told(story, how, wrap, steps, tolerance(name))


# A function or an iterator that is made anew for each half differs from the others in what it has seen, and not in its
# windows: one length will do for these.
SETTINGS = [*product(HOWS[::2], WRAPS, [1, 3]), *product(HOWS[1::2], WRAPS, [3])]


@pytest.mark.parametrize("name", BY_NAME)
def test_a_model_that_was_edited_between_windows(ranks, name):
    hold(ranks, 2, edited, [(name, *setting) for setting in SETTINGS])


# These train in the middle of the edit, or leave the optimizer, or torch's own graph, with what is gone.
_OPEN = {
    "new_head_that_nobody_steps", "assigned_behind_the_optimizer", "resized_in_place", "frozen_and_back", "swapped",
    "tied_and_untied", "weight_norm_of_which_the_optimizer_knows_half",
}  # fmt: skip


@pytest.mark.parametrize("how", HOWS[::2])
def test_a_user_who_puts_the_edited_model_on_ddp_anew(ranks, how):
    """That is what torch asks for, and nothing about it is wrong."""
    cases = [(name, how, "ddp", 3, True) for name in BY_NAME]
    hold(ranks, 2, edited, cases, only=lambda name, *_: "" if name in _OPEN else "exact")


@pytest.mark.parametrize("how", HOWS)
def test_on_one_rank_an_edit_is_harmless(ranks, how):
    def only(name: str, *_: object) -> str:  # the optimizer misses what is trained: may be said
        return "" if any(word in name for word in ("behind", "half", "nobody")) else "exact"

    hold(ranks, 1, edited, [(name, how, "bare", 3) for name in BY_NAME], only=only)


def edited_twice(names: list[str], how: str, wrap: str) -> Outcome:
    """Errors are not remembered, nor is what was exact: every edit after every other."""

    def story(run: Run) -> None:
        run.train(1)
        for name in names:
            BY_NAME[name](run)
            run.train(1)

    return told(story, how, wrap, 2)


MANY = [
    ("new_head", "appended_layer", "layer_taken_out", "weight_norm", "copied"),
    ("swapped", "frozen_and_back", "assigned", "tied", "frozen"),
    ("resized_embedding", "adapter", "part_of_something_larger"),
]


def test_many_edits_of_one_run(ranks):
    hold(ranks, 2, edited_twice, product(MANY, ["accumulating", "sync_every anew"], ["bare"]))


def edited_on_one_rank(name: str, how: str, wrap: str, store: str) -> Outcome:
    """One rank wants to compare its new parameters, the others synchronise the old ones: told as the group's time ends."""
    rank, size = dist.get_rank(), dist.get_world_size()

    def begin_group(which: str, timeout: timedelta) -> None:
        dist.destroy_process_group()
        where = f"file://{store}-{name}-{how}-{wrap}-{which}"
        dist.init_process_group("gloo", init_method=where, rank=rank, world_size=size, timeout=timeout)

    def story(run: Run) -> None:
        run.train(1)
        if rank == 1:
            BY_NAME[name](run)
        run.train(2)

    begin_group("short", timedelta(seconds=4))
    try:
        return told(story, how, wrap, 2)
    finally:
        begin_group("long", GROUP_TIMEOUT)


ON_ONE = ["new_head", "appended_layer", "frozen", "in_float32", "resized_embedding"]


def test_an_edit_on_one_rank_alone_is_an_error_on_both(ranks, tmp_path):
    cases = product(ON_ONE, HOWS[::2], WRAPS, [str(tmp_path / "store")])
    hold(ranks, 2, edited_on_one_rank, cases, only="error", limit=100.0)
