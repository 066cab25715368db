"""Optimizers of all kinds, among them those that nobody should write and somebody has."""

from __future__ import annotations

from collections import deque

import torch


class Counting(torch.optim.Optimizer):
    """Keeps counters in its groups: a number, a tensor, a list, and one that it makes in its first step."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr, "k": 0, "total": torch.zeros(()), "history": [], "pair": (0, 1.0)})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["k"] += 1
            group["total"] += 1
            group["late"] = group.get("late", 0) + group["k"]
            group["history"].append(group["k"])
            group["pair"] = (group["pair"][0] + 1, 1.0)
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad, alpha=group["lr"] / (group["k"] + group["late"] + len(group["history"])))


class Nested(torch.optim.Optimizer):
    """Keeps lists, dicts, deques and numbers in its state, new tensors in the place of old ones, and noise."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        self.state["all"]["steps"] = self.state["all"].get("steps", 0) + 1
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                state["last"] = p.grad.clone() + state.get("last", 0.0)  # a new tensor
                state.setdefault("past", []).append(p.grad.clone())
                state.setdefault("queue", deque(maxlen=2)).append(float(p.grad.sum()))
                state.setdefault("deep", {"a": [torch.zeros_like(p)]})["a"][0].add_(p.grad)
                if len(state["past"]) > 2:
                    del state["past"][0]
                for g in (state["last"], *state["past"], state["deep"]["a"][0]):
                    p.sub_(g, alpha=group["lr"] * (1 + sum(state["queue"])) / self.state["all"]["steps"])
                p.add_(torch.randn_like(p), alpha=1e-3)


SOME = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.3, weight_decay=0.1),
    "nesterov foreach": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, foreach=True),
    "SGD fused": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.3, fused=True),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=False),
    "AdamW foreach": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=True),
    "AdamW fused": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    "AdamW amsgrad": lambda p: torch.optim.AdamW(p, lr=0.1, amsgrad=True),
    "AdamW lr tensor": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.1)),
    "Adam groups": lambda p: torch.optim.Adam([{"params": p[:1], "lr": 0.3}, {"params": p[1:]}], lr=0.1),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1, lr_decay=0.1),
    "Adadelta": lambda p: torch.optim.Adadelta(p),
    "Adamax": lambda p: torch.optim.Adamax(p, lr=0.1),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=0.1),
    "ASGD": lambda p: torch.optim.ASGD(p, lr=0.1, t0=1),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=0.1),
    "RAdam": lambda p: torch.optim.RAdam(p, lr=0.1),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.1, centered=True, momentum=0.5),
    "Rprop": lambda p: torch.optim.Rprop(p, lr=0.1),
    "counting": Counting,
    "nested": Nested,
}
