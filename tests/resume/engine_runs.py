"""Runs on any engine that can be saved in the middle of a window and gone on with elsewhere."""

from __future__ import annotations

import torch
from torch import nn

import gradsync
from tests.support.compare import assert_equal_states
from tests.support.files import through_a_file
from tests.support.homes import Home
from tests.support.reference import mean_of, states
from tests.support.training import DECAY, LR, data, items_of

NUM = 5  # micro-batches: a window of 3, and a tail of 2


class Run:
    """A model on its engine, if need be with `parameters`, and what they were after each update."""

    def __init__(self, home: Home, sync: str | None = None, parameters=None, forward=None) -> None:
        self.home, self.states = home, []
        model = home.model
        if parameters is not None:
            with torch.no_grad():
                for p, q in zip(model.parameters(), parameters, strict=True):
                    p.copy_(q)
        self.optimizer = torch.optim.SGD(model.parameters(), lr=LR, weight_decay=DECAY, foreach=home.foreach)
        forward = forward or (lambda model, rank, index: model(data(rank, index)))
        options = {"sync": sync} if sync else home.options

        @gradsync.accumulating(3, model=model, optimizer=self.optimizer, **options)
        def step(index):
            return mean_of(forward(model, home.rank, index))

        self.step = step
        self.optimizer.register_step_post_hook(lambda *_: self.states.append(self.home.full()))

    def go(self, start: int, end: int) -> None:
        for index in range(start, end):
            self.step(index)

    def taken(self) -> dict:
        """Its state, through a file; the run is over."""
        state = self.step.state_dict()
        self.step.reset()
        return through_a_file(state)

    @property
    def gradients(self) -> dict:
        return self.step.state_dict()["windows"][0]["open"]["gradients"]


def flush(run: Run, start: int, end: int) -> None:
    run.go(start, end)
    run.step.flush()


def over(run: Run, start: int, end: int) -> None:
    for index in run.step.over(range(start, end)):
        run.step(index)


def resumed_anywhere(make, loop, sync: str | None = None, forward=None, *, tolerance: float = 0.0) -> list:
    """Saved after any micro-batch and gone on with in fresh objects, it ends to the bit as if nothing had been.

    `tolerance` is for an engine that adds in another order after it was made anew. Returns what the parameters were after each update of the run that nothing interrupted.
    """
    whole = Run(make(), sync, forward=forward)
    loop(whole, 0, NUM)
    run, saved = Run(make(), sync, forward=forward), []
    for stop in range(NUM):
        if run.step.progress.index == 0:  # in a window they stay what they are
            parameters = [p.detach().clone() for p in run.home.model.parameters()]
        saved.append((parameters, through_a_file(run.step.state_dict()), list(run.states)))
        run.go(stop, stop + 1)
    run.step.reset()
    for stop, (parameters, state, before) in enumerate(saved):
        again = Run(make(), sync, parameters, forward)
        again.step.load_state_dict(state)
        assert again.step.progress.micro_steps == stop
        loop(again, stop, NUM)
        try:
            assert_equal_states(before + again.states, whole.states, tolerance=tolerance)
        except AssertionError as error:
            raise AssertionError(f"resumed after {stop}: {error}") from error
    return whole.states


def updates(bare: nn.Module, loss, num_ranks: int, windows=(range(3), range(3, NUM))) -> list:
    """The parameters of a bare module after each update; `loss(module, rank, index)` is that of a micro-batch."""

    def mean(model, items):
        return sum(loss(model, *item) for item in items) / len(items)

    return states(bare, [items_of(window, num_ranks) for window in windows], mean, lr=LR, decay=DECAY)
