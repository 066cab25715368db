"""The whole: on real ranks, the parameters after each landing are those of a simulation in float64 on one process."""

from __future__ import annotations

import pytest
import torch

from tests.overlap.loop import Plan, drive, simulate


def far(seen, expected) -> float:
    assert len(seen) == len(expected)
    pairs = [pair for one, two in zip(seen, expected) for pair in zip(one, two)]
    return max(((a.double() - b).abs().max().item() for a, b in pairs), default=0.0)


def even(num_ranks: int, steps: int = 3, windows: int = 5) -> tuple[tuple[int, ...], ...]:
    return tuple((steps,) * num_ranks for _ in range(windows))


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_parameters_after_each_landing_are_those_of_the_simulation(ranks, num_ranks):
    """For every m from 1 to steps, on every rank; of a loop by hand. With the decorator, in all its ways: test_decorated."""
    for m, optimizer, clip_norm in ((1, "sgd", 0.3), (2, "fused", None), (3, "adamw", 0.3)):
        plan = Plan(even(num_ranks), m, optimizer, clip_norm)
        expected = simulate(plan)
        for seen in ranks(num_ranks).run(drive, plan):
            assert far(seen, expected) < 1e-12


@pytest.mark.parametrize(
    "counts",
    [
        ((3, 3), (3, 3), (1, 1)),  # a tail shorter than m
        ((3, 3), (2, 3), (0, 3), (0, 3), (0, 1)),  # a rank that has run out reduces zeros
        ((3, 2), (3, 0), (3, 3), (3, 1)),  # and goes on from true parameters
        ((3, 3, 3), (3, 0, 1), (0, 0, 2), (3, 3, 3)),
    ],
)
def test_tails_and_uneven_ranks_count_each_micro_batch_once(ranks, counts):
    for m, optimizer in ((1, "sgd"), (2, "adamw"), (3, "sgd")):
        plan = Plan(counts, m, optimizer, 0.5)
        expected = simulate(plan)
        for seen in ranks(len(counts[0])).run(drive, plan):
            assert far(seen, expected) < 1e-12


def test_provisional_parameters_matter(ranks):
    """Else the simulation would prove nothing: exact training goes elsewhere."""
    late, exact = simulate(Plan(even(2), 3)), simulate(Plan(even(2), 0))
    assert far(late, exact) > 1e-3


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_a_run_repeats_bit_by_bit_and_ranks_are_equal(ranks, num_ranks):
    plan = Plan(even(num_ranks), 2, "fused", 0.3, dtype="float32")
    one, two = (ranks(num_ranks).run(drive, plan) for _ in range(2))
    for seen in (*one, *two):
        assert all(torch.equal(a, b) for x, y in zip(seen, one[0]) for a, b in zip(x, y))
