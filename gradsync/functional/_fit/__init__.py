"""A micro-batch in parts, and how large one may be."""
