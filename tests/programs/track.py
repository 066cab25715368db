"""What the ranks hold of a function's windows."""

from __future__ import annotations

import torch


class Held:
    """What one rank holds of one window."""

    def __init__(self, num_parameters: int) -> None:
        self.num = 0
        self.count = 0.0
        self.losses: list[float] = []
        self.grads: list[torch.Tensor | None] = [None] * num_parameters

    def copy(self) -> Held:
        twin = Held(0)
        twin.num, twin.count, twin.losses, twin.grads = self.num, self.count, list(self.losses), list(self.grads)
        return twin

    def add(self, loss: float, count: float, grads) -> None:
        self.num, self.count = self.num + 1, self.count + count
        self.losses.append(loss)
        self.grads = [a if b is None else b if a is None else a + b for a, b in zip(self.grads, grads, strict=True)]


class Track:
    """The windows of one function on one lane (models and their optimizer)."""

    def __init__(self, ranks: int, num_parameters: int) -> None:
        self._num_parameters = num_parameters
        self.ranks = range(ranks)
        self.window = self.updates = self.skipped = 0
        self.micro_steps, self.dropped = [0] * ranks, [0] * ranks
        self.index = [0] * ranks
        self.opened = [False] * ranks
        self.void = [False] * ranks  # a backward failed with a type in `skip`
        self.held = [Held(num_parameters) for _ in self.ranks]
        self.loss: list[float | None | str] = [None] * ranks  # "?" where it is not defined
        self.grad_norm: float | None | str = None

    def drop(self, rank: int) -> None:
        self.index[rank], self.void[rank] = 0, False
        self.held[rank] = Held(self._num_parameters)

    @property
    def is_open(self) -> bool:
        return any(self.index) or any(held.num for held in self.held)

    def snapshot(self) -> dict:
        return {
            "window": self.window, "updates": self.updates, "skipped": self.skipped,
            "micro_steps": list(self.micro_steps), "dropped": list(self.dropped), "index": list(self.index),
            "void": list(self.void), "opened": list(self.opened), "held": [held.copy() for held in self.held],
        }  # fmt: skip

    def restore(self, state: dict) -> None:
        for name, value in state.items():
            setattr(self, name, list(value) if isinstance(value, list) else value)
        self.held = [held.copy() for held in state["held"]]
        self.loss, self.grad_norm = ["?"] * len(self.ranks), "?"

    def seen(self, rank: int, size: int) -> dict:
        return {
            "micro_steps": self.micro_steps[rank], "updates": self.updates, "window": self.window,
            "index": self.index[rank], "skipped": self.skipped, "dropped": self.dropped[rank], "replays": 0,
            "size": size if self.index[rank] else None, "loss": self.loss[rank], "grad_norm": self.grad_norm,
        }  # fmt: skip
