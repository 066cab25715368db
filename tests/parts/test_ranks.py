"""At a boundary, a rank that runs out of memory finishes its gradients while the others wait for it."""

import pytest

from tests.parts import cases_ranks

KINDS = ["bare", "ddp", "find", "views"]


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("kind", KINDS)
def test_another_limit_on_each_rank(ranks, kind, where):
    """Two ranks, of which one has no memory, or each has another amount; failing early and late."""
    for limits in ([6, 2], [3, 1]):
        for at in (1, 3):
            failures = ranks(2).run(cases_ranks.windows, kind, where, limits, at)
            assert [bool(number) for number in failures] == [limit < 6 for limit in limits]


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("kind", KINDS)
def test_hooks_and_many_parameters(ranks, kind, where):
    """Hooks run once for each micro-batch, in a backward of which half fails; also with many parameters, and sums."""
    for depth, hook, sums, remember in ((4, True, False, False), (10, False, True, False), (4, True, False, True)):
        for at in (1, depth - 1):
            ranks(2).run(cases_ranks.windows, kind, where, [6, 2], at, depth, hook, sums, remember)


def test_one_and_three_ranks(ranks):
    """Each with another limit."""
    for where in ("forward", "backward"):
        ranks(1).run(cases_ranks.windows, "bare", where, [2], 2)
        ranks(3).run(cases_ranks.windows, "bare", where, [6, 3, 1], 2)
