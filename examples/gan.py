"""A GAN with two cadences: the discriminator is updated every 2 micro-batches, the generator every 4.

    python examples/gan.py
    torchrun --nproc-per-node 2 examples/gan.py

Each step function is called with both models and one optimizer. The model that the optimizer doesn't have is a
bystander there: gradients flow through it, none stay in it, and it is not synchronised, so that the two functions'
windows may overlap as they like.
"""

import argparse
import math

import torch
from torch import nn
from torch.nn.functional import softplus

import gradsync

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--steps", type=int, default=6002, help="micro-batches of each rank; at the end a window is short")
parser.add_argument("--quick", action="store_true", help="a second, for tests: --steps 402")
args = parser.parse_args()

angles = torch.arange(8) * (2 * math.pi / 8)
CENTERS = 2 * torch.stack([angles.cos(), angles.sin()], dim=-1)  # the data: 8 small clouds on a circle
NOISE = 8  # dimensions of what the generator starts from


def clouds(size):
    return CENTERS[torch.randint(8, (size,))] + 0.1 * torch.randn(size, 2)


def network(inputs, outputs):
    return nn.Sequential(
        nn.Linear(inputs, 64), nn.LeakyReLU(0.2), nn.Linear(64, 64), nn.LeakyReLU(0.2), nn.Linear(64, outputs)
    )


@gradsync.accumulating(steps=2)
def train_discriminator(discriminator, generator, optimizer, real):
    fake = generator(torch.randn(len(real), NOISE))  # no .detach(): nothing of this step reaches the generator's .grad
    return softplus(-discriminator(real)).mean() + softplus(discriminator(fake)).mean()


@gradsync.accumulating(steps=4)
def train_generator(discriminator, generator, optimizer, size):
    return softplus(-discriminator(generator(torch.randn(size, NOISE)))).mean()


def held(model):
    """How much gradient there is in a model now."""
    return sum(parameter.grad.abs().sum().item() for parameter in model.parameters() if parameter.grad is not None)


@torch.no_grad()
def distance(generator):
    """From what it makes to the nearest cloud, and how many of the clouds it has found."""
    nearest = torch.cdist(generator(torch.randn(2000, NOISE)), CENTERS).min(dim=-1)
    found = torch.bincount(nearest.indices[nearest.values < 0.5], minlength=8) > 50
    return nearest.values.mean().item(), found.sum().item()


with gradsync.process_group() as world:
    torch.manual_seed(0)
    discriminator, generator = network(2, 1), network(NOISE, 2)
    d_optimizer = torch.optim.Adam(discriminator.parameters(), lr=1e-3, betas=(0.5, 0.9))
    g_optimizer = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.9))

    torch.manual_seed(1 + world.rank)  # every rank has data and noise of its own
    before, _ = distance(generator)
    for real in train_discriminator.over(clouds(64) for _ in range(402 if args.quick else args.steps)):
        train_discriminator(discriminator, generator, d_optimizer, real)
        in_window = held(discriminator)  # half a window, or nothing
        train_generator(discriminator, generator, g_optimizer, len(real))
        assert held(discriminator) == in_window  # the generator's step went through it and left no trace
    train_generator.flush()  # the loop is the discriminator's .over, which has closed its own short window only
    after, found = distance(generator)

    if world.rank == 0:
        d_updates, g_updates = train_discriminator.progress.updates, train_generator.progress.updates
        print(f"{d_updates} updates of the discriminator, {g_updates} of the generator")
        print(f"distance to the data {before:.3f} -> {after:.3f}, {found} of 8 clouds found")
