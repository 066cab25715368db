"""An ordinary training loop, its gradient accumulation written by hand; after.py is the same loop with gradsync.

    diff -u examples/before.py examples/after.py

Both run under python and under torchrun. Where the data fills the windows, both end with the same bits. With
--batches 30 it doesn't, they end with different ones, and after.py is right: see (1).
"""

import argparse
import hashlib
from contextlib import nullcontext

import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

import gradsync  # for process_group only: torch's own way out of a gloo job aborts in one run of three

STEPS = 4


def train_epoch(model, optimizer, scheduler, batches):
    for i, (inputs, targets) in enumerate(batches):
        last = (i + 1) % STEPS == 0 or i + 1 == len(batches)  # (2) ranks with different len(batches) hang
        held = isinstance(model, DistributedDataParallel) and not last
        with model.no_sync() if held else nullcontext():  # (3) must be around the forward too, or nothing is held
            loss = mse_loss(model(inputs), targets)
            (loss / STEPS).backward()  # (1) wrong in a last window of fewer than STEPS: the gradients are too small
        if last:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()


@torch.no_grad()  # (4) else this forward readies DDP, and the next backward synchronises, held or not
def evaluate(model, inputs, targets):
    return mse_loss(model(inputs), targets).item()


def train(world, num_batches):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 1))
    if world.world_size > 1:
        model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.99)

    torch.manual_seed(1 + world.rank)  # every rank has data of its own
    inputs = torch.randn(num_batches, 16, 4)
    targets = inputs.sin().sum(dim=-1, keepdim=True)
    before = evaluate(model, inputs, targets)
    for _ in range(5):
        train_epoch(model, optimizer, scheduler, list(zip(inputs, targets, strict=True)))
    after = evaluate(model, inputs, targets)
    if world.rank == 0:
        bits = torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).view(torch.uint8)
        print(f"loss {before:.4f} -> {after:.4f}, parameters {hashlib.sha256(bytes(bits.tolist())).hexdigest()[:16]}")


parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--batches", type=int, default=32, help="micro-batches of each rank in an epoch")
args = parser.parse_args()

with gradsync.process_group() as world:
    train(world, args.batches)
