"""Decorated steps on ranks that lack memory end with the parameters of ranks that had it."""

import pytest

from tests.parts import cases_decorator as cases

KINDS = ["bare", "ddp", "find", "views", "replicate"]


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("kind", KINDS)
def test_held_and_boundary(ranks, kind, where):
    """A rank that runs out of memory, held or at the boundary with the other waiting, finishes its share."""
    ranks(2).run(cases.held_and_boundary, kind, where, [6, 2])


@pytest.mark.parametrize("kind", ["bare", "ddp"])
def test_uneven(ranks, kind):
    """Loops of other lengths, each rank with another limit."""
    for where in ("forward", "backward"):
        ranks(2).run(cases.uneven, kind, where)


@pytest.mark.parametrize("kind", ["bare", "ddp"])
def test_skip(ranks, kind):
    """Of a call in parts, what fails before a gradient drops the micro-batch; later it drops the window on all ranks."""
    for where in ("forward", "backward"):
        ranks(2).run(cases.skipping, kind, where)


@pytest.mark.parametrize("kind", ["bare", "ddp", "find"])
def test_an_armed_backward_that_cannot_be_finished(ranks, kind):
    """The collectives are completed: the other rank goes on."""
    ranks(2).run(cases.armed_and_broken, kind)


@pytest.mark.parametrize("sums", [False, True])
@pytest.mark.parametrize("kind", ["bare", "ddp", "find"])
def test_a_part_that_fails_at_a_boundary(ranks, kind, sums):
    """It completes the collectives of the window, as a whole micro-batch does whose backward fails: nobody waits.

    Where a table travels, the next one tells both ranks.
    """
    first, last = cases.WINDOW - 1, 2 * cases.WINDOW - 1
    told = [(last, "GradSyncError")] if sums else []
    assert ranks(2).run(cases.a_part_that_fails, kind, sums, limit=15) == [told, [(first, "ZeroDivisionError"), *told]]


@pytest.mark.parametrize("kind", ["bare", "ddp"])
def test_several_models(ranks, kind):
    """Two models that are trained, and a bystander."""
    for where in ("forward", "backward"):
        ranks(2).run(cases.several, kind, where)


def test_three_ranks(ranks):
    """Each with another limit."""
    for where in ("forward", "backward"):
        ranks(3).run(cases.held_and_boundary, "bare", where, [6, 3, 1])
    ranks(3).run(cases.composed, "bare")
    ranks(3).run(cases.composed, "find")


def test_refused(ranks):
    """Engines and models that cannot be cut on one rank alone are errors that say so."""
    ranks(2).run(cases.refused)
