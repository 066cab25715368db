"""The user's communication hooks, and flush through the reducer."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

from gradsync import accumulating
from tests.support.compare import assert_equal_updates
from tests.support.models import small_model
from tests.support.recorder import Recorder
from tests.support.reference import cut, mean_loss, micro_batch, train, window_mean


def flush_scenario(options: dict, hooked: bool = False) -> None:
    """flush() with the user's communication hook, and after a static graph's first window."""
    rank = dist.get_rank()
    model = small_model()
    calls = []
    home = DDP(model, **options)

    def hook(state, bucket):
        calls.append(bucket.index())
        work = dist.all_reduce(bucket.buffer() / dist.get_world_size(), async_op=True)
        return work.get_future().then(lambda future: future.value()[0])

    if hooked:
        home.register_comm_hook(None, hook)
    optimizer = Recorder(model.parameters())
    step = accumulating(steps=3)(lambda model, optimizer, x: mean_loss(model, x))
    for i in range(8):
        step(home, optimizer, micro_batch(rank, i))
    held = len(calls)
    step.flush()
    expected, _ = train(small_model(), cut([8, 8], 3), window_mean)
    assert_equal_updates(optimizer.seen, expected)
    assert (held, len(calls)) == ((2, 3) if hooked else (0, 0)), calls


@pytest.mark.parametrize("option", ["static_graph", "gradient_as_bucket_view"])
def test_flush_goes_through_the_reducer(ranks, option):
    ranks(2).run(flush_scenario, {option: True})


def test_flush_calls_the_users_hook(ranks):
    ranks(2).run(flush_scenario, {}, True)


def compressed() -> None:
    """A built-in compression hook is kept, also where the reducer had to be made anew."""
    rank = dist.get_rank()
    model = small_model(torch.float32)
    model[0].requires_grad_(False)
    home = DDP(model)
    home._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)
    model[0].requires_grad_(True)
    optimizer = Recorder(model.parameters())
    step = accumulating(steps=2)(lambda model, optimizer, x: mean_loss(model, x))
    for i in range(2):
        step(home, optimizer, micro_batch(rank, i, dtype=torch.float32))
    for g in optimizer.seen[0]:
        assert torch.equal(g, g.half().float()), "what was reduced in half precision fits into it"


def test_a_compression_hook_survives_a_new_reducer(ranks):
    ranks(2).run(compressed)
