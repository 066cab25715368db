"""What gpt.py and gpt_sync_every.py share: a text, a model, a bar. Nothing here knows of ranks or accumulation."""

import argparse
import random
import re
from pydoc_data.topics import topics

import torch
from torch import nn
from torch.nn.functional import cross_entropy, pad, scaled_dot_product_attention, softmax
from torch.nn.utils.rnn import pad_sequence

LENGTH = 160  # bytes that the model sees at once
PAD = 0  # a byte that no text contains
BATCH = 4  # paragraphs in a micro-batch
WINDOW = 4  # micro-batches in an update, on all ranks together: on 1, 2 or 4 of them


def arguments(description, *, overlaps=False):
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    if overlaps:
        parser.add_argument("--overlap", type=int, default=0, help="micro-batches that run while gradients travel")
    # 3 micro-batches too many for whole windows: the last one is short, and on two ranks uneven too.
    parser.add_argument("--steps", type=int, default=3203, help="micro-batches, on all ranks together")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--double", action="store_true", help="compute in float64: slower, with less to round")
    parser.add_argument("--quick", action="store_true", help="a few seconds, for tests: --steps 63 --double")
    args = parser.parse_args()
    if args.quick:
        args.steps, args.double = 63, True
    torch.set_default_dtype(torch.float64 if args.double else torch.float32)
    torch.set_num_threads(1)  # a model this small is fastest on one core a process
    torch.manual_seed(args.seed)
    return args


def paragraphs():
    """Python's reference as in help("assert"), every paragraph a sequence of bytes; one in 20 kept for the end."""
    text = "\n\n".join(topics[topic] for topic in sorted(topics))
    pieces = [f"\n{piece}\n".encode() for piece in re.split(r"\n\s*\n", text)]
    pieces = [piece[at : at + LENGTH + 1] for piece in pieces for at in range(0, len(piece) - 1, LENGTH)]
    sequences = [torch.tensor(list(piece)) for piece in pieces]
    return [s for i, s in enumerate(sequences) if i % 20], sequences[::20]


def plan(sequences, steps, seed):
    """Which paragraphs each micro-batch has: a function of the seed, the same however many ranks share it.

    Paragraphs of like length are together, which saves padding. So a micro-batch may have 40 bytes or 640: a mean of
    their means would be far from the mean over all bytes.
    """
    by_length = sorted(range(len(sequences)), key=lambda i: len(sequences[i]))
    batches = [by_length[at : at + BATCH] for at in range(0, len(by_length), BATCH)]
    order = random.Random(seed)
    epochs = -(-steps // len(batches))
    return [batch for _ in range(epochs) for batch in order.sample(batches, len(batches))][:steps]


def padded(sequences):
    return pad_sequence(sequences, batch_first=True, padding_value=PAD)


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.before_attention, self.before_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.to_qkv, self.from_heads = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        here, past = self.before_attention(x).chunk(2, dim=-1)
        shifted = torch.cat([here, pad(past, (0, 0, 1, -1))], dim=-1)  # half of it comes a byte late: it learns faster
        q, k, v = self.to_qkv(shifted).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.from_heads(attended.transpose(1, 2).flatten(2))
        return x + self.mlp(self.before_mlp(x))


class GPT(nn.Module):
    def __init__(self, width=64, heads=4, depth=2):
        super().__init__()
        self.bytes, self.places = nn.Embedding(256, width), nn.Embedding(LENGTH, width)
        nn.init.normal_(self.bytes.weight, std=0.5)
        nn.init.normal_(self.places.weight, std=0.1)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256)

    def forward(self, tokens):
        x = self.bytes(tokens) + self.places.weight[: tokens.shape[1]]
        return self.head(self.norm(self.blocks(x)))

    def loss(self, sequences):
        """The sum of the losses of all bytes, and how many they are: padding counts for nothing."""
        inputs, targets = sequences[:, :-1], sequences[:, 1:]
        total = cross_entropy(self(inputs).flatten(0, 1), targets.flatten(), ignore_index=PAD, reduction="sum")
        return total, (targets != PAD).sum()

    @torch.no_grad()
    def mean_loss(self, sequences):
        """Per byte, over all sequences."""
        parts = [self.loss(padded(sequences[at : at + 64])) for at in range(0, len(sequences), 64)]
        return (sum(total for total, _ in parts) / sum(count for _, count in parts)).item()

    @torch.no_grad()
    def write(self, beginning, length=LENGTH):
        tokens = torch.tensor([list(beginning.encode())])
        while tokens.shape[1] < length:
            odds = softmax(self(tokens)[:, -1] / 0.7, dim=-1)
            tokens = torch.cat([tokens, torch.multinomial(odds, 1)], dim=1)
        return bytes(tokens[0].tolist()).decode(errors="replace")


try:
    import tqdm

    Bar = tqdm.tqdm
except ImportError:

    class Bar:
        """The little that is needed of tqdm, where it is not installed: a line now and then."""

        def __init__(self, total, disable):
            self.total, self.disable, self.n = total, disable, 0

        def update(self):
            self.n += 1
            return not self.disable and self.n % 10 == 0

        def set_postfix(self, **what):
            print(f"{self.n}/{self.total}", *(f"{name} {value}" for name, value in what.items()))

        def close(self):
            pass
