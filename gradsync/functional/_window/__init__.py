"""One window after another, from a call to what came from all ranks."""
