"""Moved to tests/support/; here until nothing imports it from here."""
from tests.support.compare import assert_equal_states as same  # noqa: F401
from tests.support.reference import mean_of as mean_loss  # noqa: F401
from tests.support.training import DECAY, LR, Run, data, reference  # noqa: F401
