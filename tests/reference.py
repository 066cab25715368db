"""Moved to tests/support/; here until nothing imports it from here."""
from tests.support.compare import assert_equal_updates  # noqa: F401
from tests.support.models import small_model  # noqa: F401
from tests.support.recorder import Recorder  # noqa: F401
from tests.support.reference import cut, mean_loss, micro_batch, sum_loss, train, window_mean  # noqa: F401
