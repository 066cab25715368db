"""`fit` composes with `overlap` and `compress`: each window's gradients are the exact mean, as with the memory."""

import pytest

from tests.overlap.loop import Plan, simulate
from tests.overlap.test_truth import even, far
from tests.parts import cases_crossing as cases

UNEVEN = ((3, 3), (2, 3), (0, 3), (0, 1))
PLANS = {
    "overlap": [Plan(even(2), 1), Plan(even(2), 3, "adamw", 0.3), Plan(UNEVEN, 2, sums=True)],
    "compress": [Plan(even(2), 0, compress=True), Plan(UNEVEN, 0, "adamw", 0.3, compress=True)],
    "both": [Plan(even(2), 2, "adamw", compress=True), Plan(UNEVEN, 1, sums=True, compress=True)],
}


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("name", PLANS)
def test_two_ranks(ranks, name, where):
    """A rank lacks memory, held and at boundaries, while gradients travel; tails, ranks that run out, sums."""
    for plan in PLANS[name]:
        expected = simulate(plan)
        for (seen, parts, failures), limit in zip(ranks(2).run(cases.trained, plan, where, [4, 1]), [4, 1]):
            assert far(seen, expected) < 1e-11
            assert (parts > 1) == (failures > 0) == (limit < cases.ROWS)


def test_three_ranks(ranks):
    """Each with another limit, in float64."""
    for where in ("forward", "backward"):
        plan = Plan(even(3), 2, "adamw", 0.3)
        for seen, _, _ in ranks(3).run(cases.trained, plan, where, [4, 2, 1]):
            assert far(seen, simulate(plan)) < 1e-11
