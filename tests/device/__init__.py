"""A device to test on: named `cuda`, with the host's memory, the CPU's kernels and gloo's collectives, and true numbers.

    [result, _] = run_on_device(case, ranks=2)          # `case` is a function of a module, run in fresh processes

In a case, tensors and models go `.to("cuda")`; `with waits() as found:` counts whatever would make the host wait for a
real device, as (operation, place in gradsync); `tests.device.fake.races()` names uses of the same memory by streams
that are in no order. The ranks are joined by the backend `likenccl`, which refuses tensors of the CPU as nccl does; one
rank alone has no process group. It shows no true asynchrony, and no error of nccl's.

`source/` is the device in C++, `build` compiles it, `fake` installs it, `rank` is the processes, `jobs` starts them.
"""

from tests.device.jobs import job, need_device, run_on_device
from tests.device.waits import waits

__all__ = ["job", "need_device", "run_on_device", "waits"]
