"""The engines of the tables, which are those of `python -m gradsync verify`."""

from gradsync.verify.homes import HOMES, Home, clean, gathered, home_of, mesh, tensor_parallel  # noqa: F401
