"""What a loop may be given: data that does not say how much it is, and data that says something else."""

from __future__ import annotations


def unsized(items):
    yield from items


class Says:
    """Items, and a length that need not be theirs."""

    def __init__(self, items: list, length: int) -> None:
        self.items, self.length = items, length

    def __len__(self) -> int:
        return self.length

    def __iter__(self):
        return iter(self.items)
