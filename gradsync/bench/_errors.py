"""The error with which the bench ends when it cannot measure."""


class BenchError(Exception):
    """A whole sentence for the terminal: what was needed, what came, what to do."""
