"""Gradients that travel while the next window computes.

`travel.py` has the communication hook, and `travel_hook.py` puts it on a DDP. `provisional.py` makes a step with the
rank's own gradients until the means arrive, and `saved.py` undoes it. `in_flight.py` takes a window from its boundary
to its landing, `watch.py` notices writes to the parameters meanwhile, and `check.py` raises where overlap is
impossible. `compress_of_bare.py` has the windows of a call with `compress`. Nothing in here knows of the decorator.
"""

from gradsync.overlap.check import check_compress, check_ddp, check_optimizers, check_scaler, check_settings
from gradsync.overlap.in_flight import LEFT, InFlight, depart, go_back, landing, step_ahead
from gradsync.overlap.travel import Flight, Travel, travel
from gradsync.overlap.travel_hook import travel_of

__all__ = [
    "LEFT",
    "Flight",
    "InFlight",
    "Travel",
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
    "travel_of",
]
