"""`python -m gradsync verify` on a device: the same promises, with all tensors there and a backend that takes no others."""

from __future__ import annotations

import json
import sys

from gradsync.verify import main
from tests.device import need_device

ENGINES = ["bare", "ddp", "fsdp1_full_orig", "fsdp2"]
PROMISES = ["full_windows", "loss_sum", "clipping", "amp_with_an_inf_on_one_rank", "exception_in_the_boundary_backward", "overlap", "fit", "uneven_over"]


def test_the_promises_hold_on_a_device(capfd):
    need_device()
    asked = [*(f"--engine={one}" for one in ENGINES), *(f"--promise={one}" for one in PROMISES)]
    code = main([*asked, "--json"], [sys.executable, "-m", "tests.device.verify_rank"])
    told = json.loads(capfd.readouterr().out)
    assert [one for one in told["cells"] if not one["holds"]] == [] and code == 0
    assert len(told["cells"]) == len(ENGINES) * len(PROMISES)
    assert told["on"] == [{"ranks": 2, "device": "cuda:0", "backend": "likenccl"}]
