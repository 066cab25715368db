"""The loop of gpt.py with `sync_every`: backward, clip, step and zero_grad stay in the loop, where you can see them.

    python examples/gpt_sync_every.py
    torchrun --nproc-per-node 2 examples/gpt_sync_every.py

It ends with the loss of gpt.py.
"""

import torch
from small_gpt import GPT, WINDOW, Bar, arguments, padded, paragraphs, plan
from torch.utils.data import DataLoader

import gradsync

args = arguments(__doc__)
updates = -(-args.steps // WINDOW)

with gradsync.process_group() as world:
    training, held_out = paragraphs()
    mine = plan(training, args.steps, args.seed)[world.rank :: world.world_size]  # every rank its share of each window
    batches = DataLoader(training, batch_sampler=mine, collate_fn=padded)

    model = GPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-2, total_steps=updates + 1, pct_start=0.1)

    before = model.mean_loss(held_out)
    bar = Bar(total=updates, disable=world.rank > 0)
    for step, sequences in gradsync.sync_every(model, WINDOW // world.world_size, batches):
        loss, count = model.loss(sequences)  # the sum over this micro-batch's bytes, and their number
        step.backward(loss, count=count)
        if step.last:  # the gradients are now the mean over all bytes of all ranks in this window
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            if bar.update():
                bar.set_postfix(loss=f"{loss.item() / count.item():.3f}")  # of this micro-batch
    bar.close()

    if world.rank == 0:
        print(f"loss per byte of text that it never saw: {before:.10f} at first, {model.mean_loss(held_out):.10f} now")
        print(model.write("\nThe "))
