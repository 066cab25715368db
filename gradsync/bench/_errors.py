"""What the bench ends with when it cannot measure."""


class BenchError(Exception):
    """A whole sentence for the terminal: what was needed, what came, what to do."""
