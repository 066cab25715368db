"""Ranks of one tensor-parallel group run one forward: different lengths are an error."""

from __future__ import annotations

import re

import pytest
import torch.distributed as dist

import gradsync
from tests.support.compare import assert_equal_states
from tests.support.homes import tensor_parallel
from tests.support.models import net
from tests.support.reference import mean_of
from tests.support.training import Run, data, reference


def tensor_parallel_ranks_of_unequal_length(dimensions: dict, lengths: list[int], said: list[str]) -> None:
    """They would wait for each other in a forward that one of them alone runs."""
    home = tensor_parallel(net(), **dimensions)
    rank = dist.get_rank()
    text = f"numbers of items, but {said[rank // 2]}. Ranks of one tensor-parallel group run one forward: give them the same data."
    with pytest.raises(gradsync.GradSyncError, match=re.escape(text)):
        Run(home, named=True).over(lengths[rank])
    with pytest.raises(gradsync.GradSyncError, match=re.escape(text)):
        for micro, index in gradsync.sync_every(home.model, 3, range(lengths[rank])):
            micro.backward(mean_of(home.model(data(home.rank, index))))
    run = Run(home)
    run.over(3)
    assert_equal_states(run.states, reference(home, [range(3)]))
    if not all(lengths):
        return
    # Where they are not known: as soon as they differ.
    text = "must come to the same micro-batches, but those of data-parallel rank 1 do not"
    with pytest.raises(gradsync.GradSyncError, match=text):
        Run(tensor_parallel(net(), **dimensions)).over(lengths[rank], known=False)
    home = tensor_parallel(net(), **dimensions)
    with pytest.raises(gradsync.GradSyncError, match=text):
        for micro, index in gradsync.sync_every(home.model, 3, iter(range(lengths[rank]))):
            micro.backward(mean_of(home.model(data(home.rank, index))))


@pytest.mark.parametrize(
    ("lengths", "said"),
    [
        ([3, 3, 5, 3], ["rank 0 has [3, 5], rank 1 has [3, 3]", "rank 2 has [3, 5], rank 3 has [3, 3]"]),
        ([3, 0, 3, 3], ["rank 0 has [3, 3], rank 1 has [0, 3]", "rank 2 has [3, 3], rank 3 has [0, 3]"]),
    ],
)
@pytest.mark.parametrize("dimensions", [{"data": 2}, {"replicas": 2, "shards": 1}], ids=["fsdp2", "hsdp"])
def test_tensor_parallel_ranks_of_unequal_length(ranks, dimensions, lengths, said):
    """Are an error on every rank, of the groups with equal lengths too, before any forward."""
    ranks(4).run(tensor_parallel_ranks_of_unequal_length, dimensions, lengths, said, limit=30)
