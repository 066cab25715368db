"""`gradsync.functional.fit` in loops of `sync_every`: on ranks that lack memory, as one big batch in float64."""

import gc
import weakref

import pytest
import torch

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


def test_it_keeps_no_model_alive():
    """What was made once, for models that come and go, holds neither their parameters nor their engines."""
    backward = gradsync.functional.fit(lambda model, x: model(x).square().mean())

    def train():
        model = torch.nn.Linear(3, 1)
        for step, x in gradsync.sync_every(model, 2, torch.ones(2, 4, 3)):
            backward(step, model, x)
        return [weakref.ref(one) for one in (model, *model.parameters())]

    ends = train()
    gc.collect()
    assert not any(end() is not None for end in ends)


def test_wrong_arguments():
    """A sentence each."""
    with pytest.raises(TypeError, match="needs a function that returns the loss"):
        gradsync.functional.fit(3)
    with pytest.raises(TypeError, match="fit must be True, False or a function"):
        gradsync.functional.fit(len, 3)
