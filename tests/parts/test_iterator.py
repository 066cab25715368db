"""`gradsync.functional.fit` in loops of `sync_every`: on ranks that lack memory, as one big batch in float64."""

import pytest

import gradsync
from tests.parts import cases_iterator as cases


def test_one_rank():
    """Without an engine."""
    cases.limited("bare", [2])


@pytest.mark.parametrize("kind", ["bare", "ddp", "find", "views", "replicate"])
def test_two_ranks(ranks, kind):
    """In forward, in the middle of a backward, held and at the boundary with the other rank waiting."""
    ranks(2).run(cases.limited, kind, [6, 2])


def test_three_ranks(ranks):
    """Each with another limit."""
    ranks(3).run(cases.limited, "bare", [6, 3, 1])


@pytest.mark.parametrize("kind", ["bare", "ddp"])
def test_uneven_and_broken(ranks, kind):
    """Replays run in parts too and weigh nothing; an error that is not about memory leaves nobody waiting."""
    ranks(2).run(cases.uneven, kind)
    ranks(2).run(cases.broken, kind)


def test_wrong_arguments():
    """A sentence each."""
    with pytest.raises(TypeError, match="needs a function that returns the loss"):
        gradsync.functional.fit(3)
    with pytest.raises(TypeError, match="fit must be True, False or a function"):
        gradsync.functional.fit(len, 3)
