"""A small GPT learns from Python's own documentation, in half a minute; every byte of it weighs the same.

    python examples/gpt.py
    torchrun --nproc-per-node 2 examples/gpt.py

Both end with the same loss, because an update has the same micro-batches on any number of ranks. Only the order in
which floats are added differs, and training enlarges that: 1.45734 and 1.45731. With --double, all ten digits agree.

    torchrun --nproc-per-node 2 examples/gpt.py --overlap 2

lets gradients travel while the next window computes. That is not exact, and ends with a loss a little above.
"""

import torch
from small_gpt import GPT, WINDOW, Bar, arguments, padded, paragraphs, plan
from torch.utils.data import DataLoader

import gradsync

args = arguments(__doc__, overlaps=True)
updates = -(-args.steps // WINDOW)

with gradsync.process_group() as world:

    @gradsync.accumulating(steps=WINDOW // world.world_size, clip_norm=1.0, overlap=args.overlap)
    def train_step(model, optimizer, scheduler, sequences):
        return gradsync.LossSum(*model.loss(sequences))  # the sum over this micro-batch's bytes, and their number

    training, held_out = paragraphs()
    mine = plan(training, args.steps, args.seed)[world.rank :: world.world_size]  # every rank its share of each window
    batches = DataLoader(training, batch_sampler=mine, collate_fn=padded)

    model = GPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-2, total_steps=updates + 1, pct_start=0.1)

    before = model.mean_loss(held_out)
    bar = Bar(total=updates, disable=world.rank > 0)
    for sequences in train_step.over(batches):  # .over knows the last one, so that the short window is exact too
        train_step(model, optimizer, scheduler, sequences)
        if train_step.progress.stepped and bar.update():
            bar.set_postfix(loss=f"{train_step.progress.loss:.3f}")  # of this rank's part of the window
    bar.close()

    if world.rank == 0:
        print(f"loss per byte of text that it never saw: {before:.10f} at first, {model.mean_loss(held_out):.10f} now")
        print(model.write("\nThe "))
