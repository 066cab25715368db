"""Random programs under overlap: after each update, the parameters are those of the simulation in float64."""

from __future__ import annotations

import random

import pytest

from tests.overlap.decorated import trained
from tests.overlap.loop import Plan, simulate
from tests.overlap.test_truth import far

SEEDS = {2: range(16), 3: range(8)}


def drawn(seed: int, num_ranks: int) -> tuple[Plan, str]:
    """A plan, and how its data is handed over."""
    draw = random.Random(1000 * num_ranks + seed)
    steps = draw.choice([1, 2, 3, 4, (1, 3), (2, 4, 1)])
    how = draw.choice(["known", "unknown", "flush"])
    longest = draw.randint(1, 14)
    # Without .over every rank closes as many windows.
    lengths = [longest if how == "flush" or draw.random() < 0.4 else draw.randint(0, longest) for _ in range(num_ranks)]
    lengths[draw.randrange(num_ranks)] = longest
    plan = Plan((), m=draw.randint(1, steps if isinstance(steps, int) else 4), steps=steps)
    counts, start = [], 0
    while start < longest:
        size = plan.size(len(counts))
        counts.append(tuple(min(size, max(0, length - start)) for length in lengths))
        start += size
    items = [(rank, index) for rank, length in enumerate(lengths) for index in range(length)]

    def some(probability):
        return tuple(sorted(draw.sample(items, min(len(items), draw.randint(1, 3))))) if draw.random() < probability else ()

    infinite = some(0.25)
    return Plan(
        tuple(counts),
        plan.m,
        optimizer=draw.choice(["sgd", "adamw", "foreach", "fused", "two"]),
        clip_norm=draw.choice([None, 0.3]),
        sums=draw.random() < 0.4,
        broken=some(0.25),
        infinite=infinite,
        breaking=() if infinite else some(0.2),
        compress=num_ranks == 2 and not infinite and draw.random() < 0.3,
        steps=steps,
        tail=draw.choice(["step", "step", "drop"]) if how != "flush" else "step",
        dropout=draw.choice([0.0, 0.0, 0.4]),
        alone=tuple((draw.randrange(num_ranks), window, draw.randint(0, 2)) for window in range(1, len(counts), 3)),
    ), how


@pytest.mark.parametrize(("num_ranks", "seed"), [(n, seed) for n, seeds in SEEDS.items() for seed in seeds])
def test_program(ranks, num_ranks, seed):
    """m, tails, uneven ranks, sums, skips, failures, clip, dropout, steps as a function, compress: drawn together."""
    plan, how = drawn(seed, num_ranks)
    expected = simulate(plan)
    for seen in ranks(num_ranks).run(trained, plan, how):
        assert far(seen, expected) < 1e-10, (plan, how)
