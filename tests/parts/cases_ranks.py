"""Failures on ranks: in windows of three micro-batches, at the boundary with the others waiting."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gradsync import engines as gradsync_engines
from gradsync.functional._update.gradients import normalise
from gradsync.parts import Fit, halving, run_in_parts
from tests.parts.limited import BackwardOf, Held, Net, assert_same, batch, gradients, mean_loss, sum_loss

WINDOW, ROWS = 3, 6


def truth(function, hook, window, depth):
    """One process, all data of all ranks, each micro-batch's own backward."""
    model = Net(depth=depth)
    if hook:
        prepare(model, [])
    total = [torch.zeros_like(p) for p in model.parameters()]
    for rank in range(dist.get_world_size()):
        model.zero_grad()
        for index in range(WINDOW):
            found = function(model, *batch(ROWS, seed=1000 * window + 10 * index + rank))
            (found if isinstance(found, torch.Tensor) else found.loss).backward()
        for one, parameter in zip(total, model.parameters()):
            one += parameter.grad / dist.get_world_size()
    return total


def prepare(model, seen):
    for index, parameter in enumerate(model.parameters()):
        if index % 2:
            parameter.register_hook(lambda g: (seen.append("pre"), g if g is None else g.clamp(-0.01, 0.01))[1])
        if index % 3 == 0:
            parameter.register_post_accumulate_grad_hook(lambda p: seen.append("post"))


def windows(kind, where, limits, at, depth=4, hook=False, sums=False, remember=False):
    """Three windows; rank r has memory for limits[r] rows."""
    halving.free = lambda: None  # a collection for each failure would take most of the time
    rank = dist.get_rank()
    model, seen = Net(depth=depth, at=at), []
    if hook:
        prepare(model, seen)
    model.limit, model.where = limits[rank % len(limits)], where
    options = {"find": {"find_unused_parameters": True}, "views": {"gradient_as_bucket_view": True}}.get(kind, {})
    ddp = model if kind == "bare" else DistributedDataParallel(model, bucket_cap_mb=0.0001, **options)
    engines = gradsync_engines.attach([ddp])
    fit = Fit(name="train_step")
    function = sum_loss if sums else mean_loss
    for window in range(3):
        fit.open([ddp], engines)
        for engine in engines:
            engine.trainable()
        for index in range(WINDOW):
            last = index == WINDOW - 1
            if not remember:
                fit.sizes = type(fit.sizes)()
            with Held(engines):
                backward = BackwardOf(ddp, engines=engines, last=last)
                data = batch(ROWS, seed=1000 * window + 10 * index + rank)
                outcome = run_in_parts(function, (ddp, *data), {}, backward, fit)
                if last:
                    for engine in engines:
                        engine.finish()
            assert (outcome.parts > 1) == (model.limit < ROWS)
        expected = truth(function, hook, window, depth)
        assert_same(gradients(model), expected)
        if hook:
            numbers = len(list(model.parameters()))
            assert (seen.count("pre"), seen.count("post")) == (WINDOW * (numbers // 2), WINDOW * -(-numbers // 3)), seen
            seen.clear()
        for parameter in model.parameters():
            if kind == "views" and window == 0:
                parameter.grad.zero_()  # zero_grad(set_to_none=False): gradients stay in the buckets
            else:
                parameter.grad = None
    return len(model.log)
