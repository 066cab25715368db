"""Windows that are left open when a program, a function or a model ends."""

from __future__ import annotations

import gc
import textwrap
import warnings

import pytest
import torch
from torch import nn

import gradsync
from tests.support.models import small_model
from tests.support.reference import mean_loss, micro_batch

BEGIN = """
import torch, gradsync

@gradsync.accumulating(steps=4)
def train_step(model, optimizer, x):
    return model(x).mean()

def main():
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
"""
PROGRAMS = {
    "main ends": "    train_step(model, optimizer, torch.ones(1, 2))\nmain()",
    "main breaks": """
    for x in train_step.over(torch.ones(6, 1, 2)):
        train_step(model, optimizer, x)
        break
main()""",
    "everything is global": """    return model, optimizer
model, optimizer = main()
train_step(model, optimizer, torch.ones(1, 2))""",
    "an error between calls": "    train_step(model, optimizer, torch.ones(1, 2))\n    raise KeyError('the reason')\nmain()",
    "an error inside": """
    train_step(model, optimizer, torch.ones(1, 2))
    train_step(model, optimizer, torch.ones(1, 3))
main()""",
    "an error in the loop": """
    for x in train_step.over(torch.ones(6, 1, 2)):
        train_step(model, optimizer, x)
        raise KeyError('the reason')
main()""",
    "nothing is open": """
    for x in train_step.over(torch.ones(6, 1, 2)):
        train_step(model, optimizer, x)
main()""",
}


@pytest.fixture(scope="module")
def words(programs, tmp_path_factory):
    """What each program says on stderr; they run at once."""
    path = tmp_path_factory.mktemp("programs")
    running = {}
    for program, end in PROGRAMS.items():
        file = path / (program.replace(" ", "_") + ".py")
        file.write_text(textwrap.dedent(BEGIN) + end)
        running[program] = programs.start(str(file))
    return {program: one.ended().complaints for program, one in running.items()}


@pytest.mark.parametrize("program", ["main ends", "main breaks", "everything is global"])
def test_a_window_left_open_is_said_once(words, program):
    """The model dies before its function, the other way round, or the loop is left: one warning, from the user's file."""
    text = words[program]
    assert text.count("RuntimeWarning") == 1, text
    assert "train_step" in text and "flush" in text, text
    assert ".over" in text or "reset" in text, text
    assert "weakref.py" not in text, text


@pytest.mark.parametrize("program", ["an error between calls", "an error inside", "an error in the loop"])
def test_no_word_after_an_error(words, program):
    """The traceback is the news."""
    assert "Traceback" in words[program]
    assert "RuntimeWarning" not in words[program], words[program]


def test_no_word_where_nothing_is_open(words):
    assert words["nothing is open"] == ""


@pytest.mark.parametrize("calls", [1, 4])
def test_the_model_dies_before_its_function(calls):
    """At once, not at the end of the program; the function lives on."""

    @gradsync.accumulating(steps=4)
    def train_step(model, optimizer, x):
        return mean_loss(model, x)

    def main():
        model = small_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for i in range(calls):
            train_step(model, optimizer, micro_batch(0, i))

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        main()
        gc.collect()
        said = [str(one.message) for one in caught]
    if calls == 4:
        assert not said
    else:
        assert len(said) == 1, said
        assert all(word in said[0] for word in ("train_step", "over", "flush")), said
        assert "weakref.py" not in caught[0].filename


def test_the_function_dies_before_its_model():
    """A function defined in each epoch."""
    model = nn.Linear(3, 1).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def epoch():
        @gradsync.accumulating(steps=4)
        def train_step(model, optimizer, x):
            return model(x).mean()

        train_step(model, optimizer, micro_batch(0, 0))

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        epoch()
        gc.collect()
    said = [str(one.message) for one in caught]
    assert len(said) == 1 and "flush" in said[0], said
    assert "weakref.py" not in caught[0].filename
