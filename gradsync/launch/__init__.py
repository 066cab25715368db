"""Entering and leaving a job of several ranks: `process_group`, and `ddp`."""

from gradsync.launch.ddp import ddp
from gradsync.launch.process_group import World, process_group

__all__ = ["World", "ddp", "process_group"]
