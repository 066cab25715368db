"""Hooks of the user's at parameters, where an armed backward fails half-way and the parts bring the rest."""

import pytest

from tests.parts import cases_ranks


@pytest.mark.parametrize("kind", ["bare", "ddp", "find", "views"])
def test_hooks_and_many_parameters(ranks, kind):
    """Hooks run once for each micro-batch, in a backward of which half fails; also with many parameters, and sums."""
    for depth, hook, sums, remember in ((4, True, False, False), (10, False, True, False), (4, True, False, True)):
        ranks(2).run(cases_ranks.windows, kind, "backward", [6, 2], depth - 1, depth, hook, sums, remember)
    ranks(2).run(cases_ranks.windows, kind, "forward", [6, 2], 1, 4, True)
