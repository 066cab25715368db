"""A rank of `python -m gradsync verify` that has the fake device: `python -m tests.device.verify_rank TASK`."""

from tests.device import fake  # noqa: F401 - before torch, I001

import json
import sys

from gradsync.verify._rank import Task, main

if __name__ == "__main__":
    main(Task(**json.loads(sys.argv[1])))
