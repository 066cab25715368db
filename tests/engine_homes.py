"""Moved to tests/support/; here until nothing imports it from here."""
from tests.support.homes import HOMES, Home, gathered, home_of, mesh, tensor_parallel  # noqa: F401
from tests.support.models import Block, Net, net  # noqa: F401
