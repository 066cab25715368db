"""What a program of gradsync calls should do: all ranks in one process, float64, plain autograd, nothing of gradsync.

What each action does to it is in the files do_*.py.
"""

from __future__ import annotations

import torch

from tests.programs.micro_batches import FAILS, LEARNING_RATE, SKIPS, SPOILS, data, forward, loss_of
from tests.programs.track import Held, Track
from tests.support.models import Square


class Refused(Exception):
    """The window ended in an error on every rank."""


class Model:
    """All ranks in one process: their parameters, windows, scripts, and what each has to see."""

    def __init__(self, program: dict) -> None:
        self.program = program
        self.num_ranks = program["ranks"]
        self.ranks = range(self.num_ranks)
        self.lanes, self.functions = program["lanes"], program["functions"]
        self.nets = [
            [p.detach().clone().requires_grad_() for p in Square(100 + i, m["unused"], m["buffers"]).parameters()]
            for i, m in enumerate(program["models"])
        ]
        self.momenta: list = [[None] * len(self.of(i)) for i in range(len(self.lanes))]
        self.rates = [LEARNING_RATE] * len(self.lanes)
        self.seen_updates: list[list] = [[] for _ in self.lanes]
        self.tracks: dict[tuple[int, int], Track] = {}  # in the order of their first calls
        self.waiting: set[tuple[int, int]] = set()
        self.latest: list[dict[int, tuple[int, int]]] = [{} for _ in self.ranks]  # by rank: what was called last
        self.slots: dict[tuple[int, int], list] = {}
        self.slots_latest: dict[tuple[int, int], list] = {}
        self.scripts: list[list] = [[] for _ in self.ranks]
        self.expected: list[list] = [[] for _ in self.ranks]
        self.num_calls = self.seed = self.num_windows = self.num_faults = 0
        self.ended = False  # after an action that leaves the replicas apart, or the program refused

    def of(self, lane: int) -> list[torch.Tensor]:
        return [p for model in self.lanes[lane]["models"] for p in self.nets[model]]

    def size(self, f: int, window: int) -> int:
        steps = self.functions[f]["steps"]
        return steps[window % len(steps)]

    def lane_of(self, f: int, choice: int) -> int:
        """One that has been called, or else the first that has not: first calls come in order."""
        lanes = self.functions[f]["lanes"]
        called = [lane for lane in lanes if (f, lane) in self.tracks and (f, lane) not in self.waiting]
        return lanes[choice % min(len(lanes), len(called) + 1)]

    def track(self, f: int, lane: int) -> Track:
        key = (f, lane)
        self.waiting.discard(key)
        if key not in self.tracks:
            self.tracks[key] = Track(self.num_ranks, len(self.of(lane)))
        return self.tracks[key]

    def is_free(self, f: int | None, lane: int) -> bool:
        """Whether no other function has a window open there."""
        return not any(t.is_open for (g, other), t in self.tracks.items() if other == lane and g != f)

    def needs_all(self, lane: int) -> bool:
        """Whether DDP insists that each window uses each parameter, or may keep the traces of a discarded one."""
        return any(self.program["models"][m]["wrap"] != "bare" for m in self.lanes[lane]["models"])

    def has_buffers(self, lane: int) -> bool:
        return any(self.program["models"][m]["buffers"] for m in self.lanes[lane]["models"])

    def micro_batch(self, f: int | None, lane: int, op: dict, event: str, kind: str | None = None) -> dict:
        self.seed += 1
        settings = self.functions[f] if f is not None else {"skip": False, "nonfinite": "step", "kind": kind}
        if event in SKIPS | SPOILS and not settings["skip"]:
            event = "raise"
        if event == "nan" and settings["nonfinite"] == "step":
            event = "ok"
        counts = op.get("counts") or [1]
        uses = list(range(len(self.lanes[lane]["models"])))
        if op.get("part") and len(uses) > 1 and not self.needs_all(lane):
            uses = [self.seed % len(uses)]
        return {
            "seed": self.seed, "rows": 1 + self.seed * 7 % 4, "event": event, "uses": uses,
            "count": counts[self.seed % len(counts)], "kind": settings["kind"], "out": False,
        }  # fmt: skip

    def gradient(self, f: int | None, lane: int, mb: dict) -> tuple[float, list]:
        x, total = data(mb), 0.0
        watch = None if f is None else self.functions[f]["watch"]
        for place in mb["uses"]:
            y = forward(self.nets[self.lanes[lane]["models"][place]], x)
            total = total + loss_of(y if watch is None else forward(self.nets[watch], y), mb["kind"])
        if mb["event"] == "nan":
            total = total * float("nan")
        return total.item(), list(torch.autograd.grad(total, self.of(lane), allow_unused=True))

    def act(self, rank: int, action: list, result: object) -> None:
        self.scripts[rank].append(action)
        self.expected[rank].append({"result": result})

    def look(self, *, same_buffers: int | None = None) -> None:
        """What each rank must see after its last action."""
        params = [[p.detach().flatten().tolist() for p in self.of(lane)] for lane in range(len(self.lanes))]
        updates, self.seen_updates = self.seen_updates, [[] for _ in self.lanes]
        for rank in self.ranks:
            progress = {}
            for f, key in self.latest[rank].items():
                progress[f] = self.tracks[key].seen(rank, self.size(f, self.tracks[key].window))
            self.expected[rank][-1] |= {
                "params": params, "updates": updates, "progress": progress, "same_buffers": same_buffers,
                "clean": [
                    not any(t.index[rank] or t.held[rank].num for (_, other), t in self.tracks.items() if other == lane)
                    for lane in range(len(self.lanes))
                ],
                "ended": self.ended,
            }  # fmt: skip

    def call(self, track: Track, f: int, lane: int, rank: int, mb: dict) -> object:
        """One call on one rank, but for what happens at a boundary."""
        track.opened[rank] = True
        self.latest[rank][f] = f, lane
        self.num_calls += 1
        if mb["event"] in FAILS:
            self.num_faults += 1
            track.drop(rank)
            return "boom"
        loss = None
        if mb["event"] in SKIPS:
            self.num_faults += 1
            track.dropped[rank] += 1
        elif mb["event"] in SPOILS:
            self.num_faults += 1
            track.dropped[rank] += 1
            track.held[rank] = Held(len(self.of(lane)))
            track.void[rank] = True
        else:
            loss, grads = self.gradient(f, lane, mb)
            track.held[rank].add(loss, mb["count"], grads)
        track.index[rank] += 1
        track.micro_steps[rank] += 1
        return loss

    def close(self, track: Track, f: int, lane: int, *, filled: bool, flushing: bool = False) -> None:
        """What all ranks hold becomes an update, or what the settings say."""
        settings = self.functions[f]
        if not filled and not flushing and settings["tail"] == "carry":
            return
        self.num_windows += 1
        kind, held = settings["kind"], track.held
        for rank in self.ranks:
            mine = held[rank]
            divisor = mine.count if kind == "sum" else mine.num
            track.loss[rank] = None if not mine.num else sum(mine.losses) / divisor if divisor else "?"
        total = sum(h.count for h in held) if kind == "sum" else sum(h.num for h in held)
        stepped = finite = True
        if any(track.void):
            track.loss = ["?"] * self.num_ranks
        if any(track.void) or not sum(h.num for h in held) or not total or (not filled and settings["tail"] == "drop"):
            stepped, track.grad_norm = False, None
        else:
            whole = Held(len(self.of(lane)))
            for h in held:
                whole.add(0.0, 0.0, h.grads)
            grads = [None if g is None else g / total for g in whole.grads]
            finite = all(bool(g.isfinite().all()) for g in grads if g is not None)
            norm = torch.stack([g.norm() for g in grads if g is not None]).norm() if any(
                g is not None for g in grads) else torch.zeros(())
            track.grad_norm = float(norm) if settings["clip"] else None
            if settings["clip"]:
                grads = [None if g is None else g * min(1.0, settings["clip"] / (float(norm) + 1e-6)) for g in grads]
            stepped = finite or settings["nonfinite"] == "step"
            if stepped:
                self.update(lane, grads)
                if self.lanes[lane]["decay"]:
                    self.rates[lane] *= 0.9
        for rank in self.ranks:
            track.drop(rank)
            track.opened[rank] = False
        track.window += 1
        if stepped:
            track.updates += 1
        else:
            track.skipped += 1
        if not finite and settings["nonfinite"] == "raise":
            track.grad_norm = "?"
            raise Refused

    def update(self, lane: int, grads) -> None:
        self.seen_updates[lane].append([None if g is None else g.flatten().tolist() for g in grads])
        momentum, buffers = self.lanes[lane]["momentum"], self.momenta[lane]
        with torch.no_grad():
            for place, (p, g) in enumerate(zip(self.of(lane), grads, strict=True)):
                if g is not None:
                    buffers[place] = g if buffers[place] is None else momentum * buffers[place] + g
                    p -= self.rates[lane] * (buffers[place] if momentum else g)
