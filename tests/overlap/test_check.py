"""Where overlap cannot be, each in a sentence that says what to do."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from gradsync import GradSyncError
from gradsync.overlap import travel_of, check_compress, check_ddp, check_optimizers, check_scaler, check_settings
from tests.support.models import small_model


def test_settings():
    assert [check_settings(m, 4, sync="window") for m in range(5)] == [0, 1, 2, 3, 4]
    assert check_settings(7, lambda window: 3, sync="window") == 7
    assert check_settings(0, 4, sync="each") == 0
    for wrong in (True, 1.0, "1", None):
        with pytest.raises(TypeError, match="overlap needs the number of micro-batches .* int from 0"):
            check_settings(wrong, 4, sync="window")
    for wrong in (-1, 5):
        with pytest.raises(ValueError, match=f"to steps, which is 4, but is {wrong}"):
            check_settings(wrong, 4, sync="window")
    with pytest.raises(ValueError, match="sync is 'shard'. Use sync='window', or overlap=0"):
        check_settings(1, 4, sync="shard")


def test_compress():
    assert check_compress(None) is None and check_compress("bf16") is torch.bfloat16
    for wrong in ("fp16", torch.bfloat16, True):
        with pytest.raises(ValueError, match='compress needs "bf16", or None'):
            check_compress(wrong)


def test_a_scaler():
    check_scaler(None)
    check_scaler(torch.amp.GradScaler("cpu", enabled=False))
    with pytest.raises(GradSyncError, match="GradScaler scales them .* bfloat16"):
        check_scaler(torch.amp.GradScaler("cpu"))


def ddps() -> dict[str, str]:
    texts = {}
    check_ddp(DDP(small_model()))
    hooked = DDP(small_model())
    travel_of(hooked)
    check_ddp(hooked)
    theirs = DDP(small_model())
    theirs.register_comm_hook(None, not_ours)
    compiled = DDP(small_model())
    compiled._use_python_reducer = True
    for name, ddp in {
        "static": DDP(small_model(), static_graph=True),
        "unused": DDP(small_model(), find_unused_parameters=True),
        "hook": theirs,
        "compiled": compiled,
        "no ddp": nn.Sequential(nn.Linear(1, 1)),
    }.items():
        with pytest.raises(GradSyncError) as caught:
            check_ddp(ddp)
        texts[name] = str(caught.value)
    from torch.distributed.optim import PostLocalSGDOptimizer, ZeroRedundancyOptimizer

    from gradsync.overlap.check import _COMMUNICATES

    for kind in (ZeroRedundancyOptimizer, PostLocalSGDOptimizer):  # they are known by name
        assert f"{kind.__module__}.{kind.__qualname__}" in _COMMUNICATES
    optimizer = ZeroRedundancyOptimizer(small_model().parameters(), torch.optim.SGD, lr=0.1)
    with pytest.raises(GradSyncError) as caught:
        check_optimizers([torch.optim.SGD(small_model().parameters()), optimizer])
    texts["zero"] = str(caught.value)
    return texts


def not_ours(state, bucket):
    future = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def test_engines_and_optimizers(ranks):
    for texts in ranks(2).run(ddps):
        assert "static_graph=True" in texts["static"]
        assert "find_unused_parameters=True" in texts["unused"]
        assert "has the communication hook not_ours, and torch takes one" in texts["hook"]
        assert "python_reducer" in texts["compiled"]
        assert "this model is on Sequential" in texts["no ddp"]
        assert "a step of ZeroRedundancyOptimizer communicates" in texts["zero"]
        assert all("overlap=0" in text for text in texts.values())
