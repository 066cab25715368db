"""What a decorated function shows of itself: help, dir, repr."""

from __future__ import annotations

import inspect
import pydoc

import pytest

import gradsync
from tests.support.reference import mean_loss

METHODS = ["over", "flush", "settle", "reset", "state_dict", "load_state_dict"]


@gradsync.accumulating(steps=4, clip_norm=1.0)
def train_step(model, optimizer, x):
    """The step of this test."""
    return mean_loss(model, x)


class Trainer:
    @gradsync.accumulating(steps=4, model=lambda self, *_: self.model, optimizer=lambda self, *_: self.optimizer)
    def train_step(self, x):
        """The method of this test."""
        return mean_loss(self.model, x)


FACES = {"a function": lambda: train_step, "a method": lambda: Trainer().train_step, "of a class": lambda: Trainer.train_step}


def shown(thing) -> str:
    return pydoc.plain(pydoc.render_doc(thing))


@pytest.mark.parametrize("face", FACES)
@pytest.mark.parametrize("name", METHODS)
def test_help_of_what_it_has(face, name):
    """`help(train_step.over)`: its own words and its parameters, on functions and methods."""
    method = getattr(FACES[face](), name)
    assert inspect.getdoc(method), f"{name} has no docstring"
    assert inspect.getdoc(method).splitlines()[0] in shown(method)
    if name == "over":
        assert "iterable" in str(inspect.signature(method)), inspect.signature(method)


@pytest.mark.parametrize("face", FACES)
def test_help_of_the_function(face):
    """`help(train_step)`: the user's docstring and signature, and what the decorator added."""
    text = shown(FACES[face]())
    assert "of this test." in text, text
    assert "x" in text
    for name in [*METHODS, "progress"]:
        assert name in text, f"{name} is not in help: {text}"


@pytest.mark.parametrize("face", FACES)
def test_dir(face):
    assert {*METHODS, "progress", "__wrapped__"} <= set(dir(FACES[face]()))


@pytest.mark.parametrize("face", FACES)
def test_repr(face):
    """Its name, that it accumulates, and how much."""
    text = repr(FACES[face]())
    assert "train_step" in text and "accumulating" in text and "4" in text, text


def test_name_doc_and_signature_stay():
    assert train_step.__name__ == "train_step"
    assert train_step.__doc__.startswith("The step of this test.")  # what follows, if anything, is for help()
    assert list(inspect.signature(train_step).parameters) == ["model", "optimizer", "x"]
