"""What users of other tools run into, each row beside the real tool or the loop that everybody writes.

The rows are named by what goes wrong there. Where a row is the subject of another file, that file has it:
the bypassed wrapper, static graphs (test_ddp.py); a body that steps or zeroes by itself, steps that have no effect
(test_errors.py); AMP and clipping, a changing N, what is logged (test_accumulating.py).
"""

from __future__ import annotations

import pytest

CASES = "tests.comparison.cases:"


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("case", ["full_windows", "the_tail"])
def test_beside_accelerate(ranks, case, size):
    pytest.importorskip("accelerate")
    ranks(size).run(CASES + case)


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize(
    "case", ["mean_of_means", "an_exception_leaves_nothing_behind", "the_schedulers_pace", "gradients_of_the_other_half"]
)
def test_on_any_number_of_ranks(ranks, case, size):
    ranks(size).run(CASES + case)


@pytest.mark.parametrize(
    "case",
    [
        "no_sync_around_the_backward_alone", "a_flag_flipped_between_forward_and_backward",
        "a_validation_loader_in_the_middle_of_a_window",
    ],
)  # fmt: skip
def test_on_two_ranks(ranks, case):
    ranks(2).run(CASES + case)
