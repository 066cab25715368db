"""What runs on the ranks: one rank's script of calls, and what it sees after each."""

from __future__ import annotations

import warnings

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

import gradsync
from gradsync import GradSyncError, LossSum
from tests.programs.micro_batches import LEARNING_RATE, Boom, SkipMe, data, loss_of
from tests.support.files import through_a_file
from tests.support.models import Square
from tests.support.recorder import Recorder
from tests.support.traps import Trap

WRAPS = {
    "bare": None,
    "ddp": {},
    "find_unused": {"find_unused_parameters": True},
    "views": {"gradient_as_bucket_view": True},
    "small": {"bucket_cap_mb": 1e-5},
    "hook": {},
}


def ready() -> None:
    """The ranks are there."""


def play(program: dict, scripts: list, refusals: list) -> list:
    """This rank's script; what was seen after each action."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # windows left open, which programs do
        player = Player(program)
        seen = []
        for action, player.may_refuse in zip(scripts[dist.get_rank()], refusals[dist.get_rank()], strict=True):
            result = getattr(player, action[0])(*action[1:])
            seen.append({"result": result, **player.look()})
        assert all(home.require_backward_grad_sync for home in player.homes if isinstance(home, DDP))
        return seen


def wrap(net: torch.nn.Module, how: str) -> torch.nn.Module:
    if WRAPS[how] is None:
        return net
    home = DDP(net, **WRAPS[how])
    if how == "hook":
        home.register_comm_hook(None, average)
    return home


def average(_, bucket):
    """A communication hook that does what DDP does without one."""
    work = dist.all_reduce(bucket.buffer().div_(dist.get_world_size()), async_op=True)
    return work.get_future().then(lambda future: future.value()[0])


class Player:
    def __init__(self, program: dict) -> None:
        self.program = program
        self.nets = [Square(100 + i, m["unused"], m["buffers"]) for i, m in enumerate(program["models"])]
        self.homes = [wrap(net, m["wrap"]) for net, m in zip(self.nets, program["models"], strict=True)]
        self.lane_nets = [[self.nets[m] for m in lane["models"]] for lane in program["lanes"]]
        self.optimizers = [
            Recorder([p for net in nets for p in net.parameters()], LEARNING_RATE, momentum=lane["momentum"])
            for nets, lane in zip(self.lane_nets, program["lanes"], strict=True)
        ]
        self.schedulers = [
            torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9) if lane["decay"] else None
            for optimizer, lane in zip(self.optimizers, program["lanes"], strict=True)
        ]
        self.functions = [self.make(f) for f in range(len(program["functions"]))]
        self.states: dict = {}
        self.may_refuse = False  # whether the current action may end in a GradSyncError

    def make(self, f: int):
        settings = self.program["functions"][f]
        steps = settings["steps"]

        def step(lane, mb, *_):
            loss = self.body(lane, mb, settings["watch"])
            if settings["kind"] == "mean":
                return loss
            return {"loss": LossSum(loss, torch.tensor(mb["count"], dtype=torch.float64) if mb["seed"] % 3 == 0 else mb["count"])}

        step.__name__ = step.__qualname__ = f"f{f}"
        named = {}
        if settings["named"]:
            models, optimizer, scheduler = self.cast(f, settings["lanes"][0])
            named = {"model": models, "optimizer": optimizer, "scheduler": scheduler}
        return gradsync.accumulating(
            steps=steps[0] if len(steps) == 1 else lambda window: steps[window % len(steps)],
            tail=settings["tail"],
            clip_norm=settings["clip"],
            nonfinite=settings["nonfinite"],
            skip=SkipMe if settings["skip"] else (),
            **named,
        )(step)

    def cast(self, f: int, lane: int):
        watch = self.program["functions"][f]["watch"]
        models = [self.homes[m] for m in self.program["lanes"][lane]["models"]]
        models += [] if watch is None else [self.homes[watch]]
        return tuple(models), self.optimizers[lane], self.schedulers[lane]

    def body(self, lane: int, mb: dict, watch: int | None = None) -> torch.Tensor:
        event = mb["event"]
        if event == "raise":
            raise Boom
        if event == "skip":
            raise SkipMe
        x, total = data(mb), 0.0
        traps = {"backward_deep": Boom(), "spoil_deep": SkipMe()}
        for place in mb["uses"]:
            y = self.homes[self.program["lanes"][lane]["models"][place]](x, trap=traps.get(event))
            total = total + loss_of(y if watch is None else self.homes[watch](y), mb["kind"])
        if event == "raise_late":
            raise Boom
        if event == "skip_late":
            raise SkipMe
        if event == "nan":
            total = total * float("nan")
        return Trap.apply(total, Boom() if event == "backward" else SkipMe()) if event in {"backward", "spoil"} else total

    def call(self, f: int, lane: int, mb: dict):
        function = self.functions[f]
        if self.program["functions"][f]["named"]:
            return function(lane, mb)
        models, optimizer, scheduler = self.cast(f, lane)
        return function(lane, mb, *models, optimizer, scheduler)

    def look(self) -> dict:
        updates = [optimizer.seen for optimizer in self.optimizers]
        for optimizer in self.optimizers:
            optimizer.seen = []
        return {
            "params": [[p.detach().flatten().tolist() for net in nets for p in net.parameters()] for nets in self.lane_nets],
            "clean": [all(p.grad is None for net in nets for p in net.parameters()) for nets in self.lane_nets],
            "updates": [
                [[None if g is None else g.flatten().tolist() for g in grads] for grads in seen] for seen in updates
            ],
            "buffers": [[b.tolist() for net in nets for b in net.buffers()] for nets in self.lane_nets],
            "progress": {f: _progress(function) for f, function in enumerate(self.functions)},
        }  # fmt: skip

    def refused(self, error: GradSyncError) -> str:
        if not self.may_refuse:
            raise error
        return f"refused: {error}"

    # -- actions ----------------------------------------------------------------------------------------------------

    def calls(self, f: int, lane: int, calls: list) -> list:
        seen = []
        for mb in calls:
            try:
                returned = self.call(f, lane, mb)
                loss = returned["loss"].loss if isinstance(returned, dict) else returned
                loss = None if loss is None else loss.item()
            except Boom:
                loss = "boom"
            except GradSyncError as error:
                loss = self.refused(error)
            progress = self.functions[f].progress
            seen.append({"loss": loss, "stepped": progress.stepped, "progress": _progress(self.functions[f])})
        return seen

    def over(self, f: int, items: list, sized: bool, nest, leave) -> str:
        loop = self.functions[f].over(items if sized else iter(items))
        try:
            for number, calls in enumerate(loop if nest is None else self.functions[nest].over(loop)):
                for g, lane, mb in calls:
                    try:
                        self.call(g, lane, mb)
                    except Boom:
                        if mb["out"]:
                            raise
                if leave is not None and leave is not False and number == leave:
                    return "left"
        except Boom:
            return "boom"
        except GradSyncError as error:
            return self.refused(error)
        return "end"

    def flush(self, f: int) -> str:
        try:
            self.functions[f].flush()
        except GradSyncError as error:
            return self.refused(error)
        return "end"

    def reset(self, f: int) -> str:
        self.functions[f].reset()
        return "end"

    def nothing(self) -> str:
        return "end"

    def save(self, f: int, slot: int) -> str:
        self.states[f, slot] = through_a_file(self.functions[f].state_dict())
        return "end"

    def load(self, f: int, slot: int) -> str:
        self.functions[f].load_state_dict(self.states[f, slot])
        return "end"

    def resume(self, f: int) -> str:
        state = through_a_file(self.functions[f].state_dict())
        self.functions[f].reset()
        self.functions[f] = self.make(f)
        self.functions[f].load_state_dict(state)
        return "end"

    def sync(self, lane: int, steps: list, items: list, mode: str, leave, plain: bool) -> str:
        optimizer = self.optimizers[lane]
        homes = [self.homes[m] for m in self.program["lanes"][lane]["models"]]
        steps = steps[0] if len(steps) == 1 else (lambda window, all=steps: all[window % len(all)])
        if mode == "endless":
            loop = zip(gradsync.sync_every(homes, steps), items)
        else:
            loop = gradsync.sync_every(homes, steps, items if mode == "sized" else iter(items))
        number = -1
        for step, mb in loop:
            number += 1
            loss = self.body(lane, mb)
            if plain:
                (loss / step.size).backward()
            elif mb["kind"] == "sum":
                step.backward(loss, count=mb["count"])
            else:
                step.backward(loss)
            if step.last:
                optimizer.step()
                optimizer.zero_grad()
            if leave is not None and number == leave:
                break
        del loop
        optimizer.zero_grad()
        return "end"


def _progress(function) -> dict:
    p = function.progress
    return {
        "micro_steps": p.micro_steps, "updates": p.updates, "window": p.window, "index": p.index, "size": p.size,
        "skipped": p.skipped, "dropped": p.dropped, "replays": p.replays,
        "loss": None if p.loss is None else p.loss.item(),
        "grad_norm": None if p.grad_norm is None else p.grad_norm.item(),
    }  # fmt: skip
