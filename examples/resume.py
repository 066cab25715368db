"""Kill it wherever you like and start it again: it ends with the bits of a run that nobody disturbed.

    python examples/resume.py --folder /tmp/run
    torchrun --nproc-per-node 2 --max-restarts 3 examples/resume.py --folder /tmp/run

At each window's end rank 0 writes a checkpoint, all of it or nothing. `train_step.progress.micro_steps`, which is in
it, says where in the data each rank stands; a sampler's own position may not, because loaders draw ahead.
What is random draws from that number too. So nothing is skipped, and nothing is learnt from twice.

With --every 3, a checkpoint comes every 3 micro-batches, in the middle of windows as well: then each rank also writes
the gradients that it holds.
"""

import argparse
import hashlib
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

import gradsync

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--folder", type=Path, help="where checkpoints are kept, for all ranks; without it, nowhere")
parser.add_argument("--every", type=int, help="micro-batches between checkpoints; without it, one at each window's end")
parser.add_argument("--quick", action="store_true", help="2 epochs instead of 20, for tests")
args = parser.parse_args()

BATCHES = 12 * 5  # in an epoch, over all ranks; any number of ranks that divides it will do
EPOCHS = 2 if args.quick else 20


@gradsync.accumulating(steps=4, clip_norm=1.0)
def train_step(model, optimizer, scheduler, inputs, targets):
    return mse_loss(model(inputs), targets)


def batches_of(epoch, world):
    """This rank's batches of sample numbers: every epoch shuffles all samples anew, and deals them out."""
    order = torch.randperm(BATCHES * 16, generator=torch.Generator().manual_seed(epoch))
    return order.view(BATCHES, 16)[world.rank :: world.world_size].tolist()


def replace(file, content):
    """Write a file so that at any time it is there as it was or as it will be."""
    new = file.with_suffix(".new")
    with new.open("wb") as stream:
        torch.save(content, stream)
        stream.flush()
        os.fsync(stream.fileno())
    new.replace(file)


def held_by(rank, slot):
    """Where a rank keeps its part of a window that is open. Of three, one is rank 0's last word, and one its next."""
    return args.folder / f"held-by-{rank}-{slot}.pt"


def save(training, world):
    """All ranks come here after the same micro-batch."""
    progress, slot = train_step.progress, None
    if progress.index:
        slot = progress.micro_steps // args.every % 3
        replace(held_by(world.rank, slot), train_step.state_dict())
        if world.world_size > 1:
            dist.barrier()  # all ranks have written theirs: rank 0 may refer to them
    if world.rank == 0:
        states = {name: one.state_dict() for name, one in training.items()}
        replace(args.folder / "checkpoint.pt", {**states, "slot": slot})


def load(training, world):
    """Go on where the last checkpoint was written, if there is one."""
    args.folder.mkdir(parents=True, exist_ok=True)
    if not (args.folder / "checkpoint.pt").exists():
        return
    checkpoint = torch.load(args.folder / "checkpoint.pt", weights_only=True)
    if checkpoint["slot"] is not None:
        checkpoint["train_step"] = torch.load(held_by(world.rank, checkpoint["slot"]), weights_only=True)
    for name, one in training.items():
        one.load_state_dict(checkpoint[name])


with gradsync.process_group() as world:
    torch.manual_seed(0)
    inputs = torch.randn(BATCHES * 16, 4)
    data = TensorDataset(inputs, inputs.sin().sum(dim=-1, keepdim=True))
    model = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Dropout(0.1), nn.Linear(32, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.999)

    # Whatever has a state. The step function's may be loaded before its first call, as here.
    training = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "train_step": train_step}
    if args.folder:
        load(training, world)
    done = train_step.progress.micro_steps
    if done and world.rank == 0:
        print(f"going on after {done} micro-batches of each rank")

    in_epoch = BATCHES // world.world_size
    for epoch in range(done // in_epoch, EPOCHS):
        left = batches_of(epoch, world)[train_step.progress.micro_steps - epoch * in_epoch :]
        for batch in train_step.over(DataLoader(data, batch_sampler=left)):
            torch.manual_seed(train_step.progress.micro_steps * world.world_size + world.rank)  # for the dropout
            train_step(model, optimizer, scheduler, *batch)
            now = train_step.progress
            if args.folder and (now.index == 0 if args.every is None else now.micro_steps % args.every == 0):
                save(training, world)

    if world.rank == 0:
        bits = torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).view(torch.uint8)
        loss = mse_loss(model.eval()(inputs), data.tensors[1]).item()
        print(f"loss {loss:.4f}, parameters {hashlib.sha256(bytes(bits.tolist())).hexdigest()[:16]}")
