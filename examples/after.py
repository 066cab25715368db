"""The training loop of before.py with gradsync: no flag, no division, no clip, no step, no zero_grad to get wrong.

    diff -u examples/before.py examples/after.py

Both run under python and under torchrun. Where the data fills the windows, both end with the same bits. With
--batches 30 it doesn't, they end with different ones, and after.py is right: see (1).
"""

import argparse
import hashlib

import torch
from torch import nn
from torch.nn.functional import mse_loss

import gradsync

STEPS = 4


@gradsync.accumulating(steps=STEPS, clip_norm=1.0)
def train_step(model, optimizer, scheduler, inputs, targets):
    return mse_loss(model(inputs), targets)


def train_epoch(model, optimizer, scheduler, batches):
    for inputs, targets in train_step.over(batches):
        train_step(model, optimizer, scheduler, inputs, targets)


@torch.no_grad()
def evaluate(model, inputs, targets):
    return mse_loss(model(inputs), targets).item()


def train(world, num_batches):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 1))
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
