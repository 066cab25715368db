"""Gradients that travel while the next window computes.

`travel.py` has the communication hook, and `attach.py` puts it on a DDP; `saved.py` and `provisional.py` are the step
that a rank makes with its own gradients until the others' arrive, `flying.py` is a window's way from its boundary to
its landing, `watch.py` looks out meanwhile, and `check.py` says where it cannot be. Nothing in here knows of the
decorator.
"""

from gradsync.overlap.attach import attach
from gradsync.overlap.check import check_compress, check_ddp, check_optimizers, check_scaler, check_settings
from gradsync.overlap.flying import LEFT, InFlight, depart, go_back, landing, step_ahead
from gradsync.overlap.travel import Flight, Travel, travel

__all__ = [
    "LEFT",
    "Flight",
    "InFlight",
    "Travel",
    "attach",
    "check_compress",
    "check_ddp",
    "check_optimizers",
    "check_scaler",
    "check_settings",
    "depart",
    "go_back",
    "landing",
    "step_ahead",
    "travel",
]
