"""What the sharded engines touch of torch's privates is there, and does what it did in torch 2.9 to 2.15.

A failure here says what to read again before anything else is looked at.
"""

from __future__ import annotations

import pytest
import torch
from torch.distributed.fsdp import FSDPModule

CASES = "tests.engine_torch:"


@pytest.mark.parametrize("case", ["fsdp2_names", "fsdp1_names", "replicate_names"])
def test_the_names_are_there(ranks, case):
    """Each attribute that gradsync/engines/_privates.py lists."""
    ranks(2).run(CASES + case)


@pytest.mark.parametrize(
    "case",
    [
        "fsdp2_keeps_held_gradients_through_zero_grad_and_our_reset",
        "fsdp2_reads_its_switch_as_a_backward_ends",
        "fsdp2_fails_without_us_where_a_module_never_ran",
        "fsdp2_skips_the_rest_of_a_partial_reduction",
        "fsdp2_keeps_a_partial_reduction_in_the_order_of_its_parameters",
        "fsdp1_holds_a_whole_flat_gradient_and_reduces_it_to_its_shard",
        "fsdp1_reads_its_switch_as_a_backward_ends",
        "replicate_reads_its_switch_in_forward",
    ],
)
def test_torch_does_what_it_did(ranks, case):
    """The behaviour that the engines are built on, or around."""
    if "partial" in case and not hasattr(FSDPModule, "set_reduce_scatter_unused_params"):
        pytest.skip(f"torch {torch.__version__} cannot reduce unused parameters, and the engine refuses to need that")
    ranks(4 if "partial" in case else 2).run(CASES + case)
