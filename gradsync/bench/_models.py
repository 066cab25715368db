"""What is trained: an MLP, a GPT, a Hugging Face BERT, or the user's own."""

import importlib
import importlib.util
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from importlib.machinery import ModuleSpec
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from gradsync.bench._errors import BenchError
from gradsync.bench._records import Options

SIZES: Mapping[str, Mapping[str, int]] = {
    "mlp": {"batch": 128, "width": 2048, "depth": 2},
    "gpt": {"batch": 4, "width": 256, "depth": 4, "heads": 4, "length": 64, "vocab": 8192},
    "bert": {"batch": 8, "width": 256, "depth": 4, "heads": 4, "length": 64, "vocab": 30522},
}
"""Each model's sizes and their defaults: small enough for a laptop, large enough for synchronisation to cost time."""


class Workload(NamedTuple):
    """What a training loop is made of; `--factory` returns the same four."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    make_batch: Callable[[], Any]
    compute_loss: Callable[[Any, Any], Tensor]


Untrained = tuple[nn.Module, Callable[[], Any], Callable[[Any, Any], Tensor]]
"""A workload that has no optimizer yet."""


def _adamw(parameters: Iterator[nn.Parameter]) -> torch.optim.Optimizer:
    """AdamW in one pass over memory, as large models are trained, where the device has that."""
    every = list(parameters)
    try:
        return torch.optim.AdamW(every, lr=0.001, fused=True)
    except RuntimeError:
        return torch.optim.AdamW(every, lr=0.001)


OPTIMIZERS: Mapping[str, Callable[[Iterator[nn.Parameter]], torch.optim.Optimizer]] = {
    # It has no state beside the weights, and many ways are in memory together.
    "sgd": partial(torch.optim.SGD, lr=0.01),
    "adamw": _adamw,
}
"""The first is the default."""


def build(options: Options, device: torch.device) -> Workload:
    """Make a fresh workload; its weights are the same each time and on each rank."""
    torch.manual_seed(0)
    if options.factory is not None:
        return _own(options.factory, options.optimizer, options.batch, device)
    model, make_batch, compute_loss = _BUILDERS[options.model](device, options.batch, options.sizes)
    return Workload(model, _optimizer(options.optimizer, model), make_batch, compute_loss)


def check(model: str, factory: str | None, sizes: Mapping[str, int]) -> None:
    """Find out before any rank starts whether `build` has what it needs."""
    if factory is not None:
        module, _, name = factory.partition(":")
        if not (module and name):
            raise BenchError(f"--factory needs module:function; it came as {factory!r}.")
        # Not imported, because a training script may need to be a rank.
        if _spec(module) is None:
            raise BenchError(
                f"--factory {factory}: there is no module {module}; it must be importable from the folder in which the "
                "bench is started."
            )
        return
    width, heads = sizes["width"], sizes.get("heads", 1)
    if width % heads:
        raise BenchError(f"--width must be a multiple of --heads; they came as {width} and {heads}.")
    if model == "bert" and importlib.util.find_spec("transformers") is None:
        raise BenchError(
            "--model bert needs the package transformers, which is not installed here: "
            "`pip install transformers`, or take --model gpt."
        )


def _mlp(device: torch.device, batch: int, sizes: Mapping[str, int]) -> Untrained:
    width, depth = sizes["width"], sizes["depth"]
    hidden = [layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.ReLU())]
    model = nn.Sequential(*hidden, nn.Linear(width, 10)).to(device)

    def make_batch() -> tuple[Tensor, Tensor]:
        return torch.randn(batch, width, device=device), torch.randint(10, (batch,), device=device)

    return model, make_batch, _cross_entropy


class _Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        out: Tensor = x + self.mlp(self.norm2(x))
        return out


class _GPT(nn.Module):
    def __init__(self, sizes: Mapping[str, int]) -> None:
        super().__init__()
        width, vocab = sizes["width"], sizes["vocab"]
        self.token, self.position = nn.Embedding(vocab, width), nn.Embedding(sizes["length"], width)
        self.blocks = nn.Sequential(*(_Block(width, sizes["heads"]) for _ in range(sizes["depth"])))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocab, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens) + self.position.weight[: tokens.shape[1]]
        logits: Tensor = self.head(self.norm(self.blocks(x)))
        return logits.transpose(1, 2)


def _gpt(device: torch.device, batch: int, sizes: Mapping[str, int]) -> Untrained:
    vocab, length = sizes["vocab"], sizes["length"]
    model = _GPT(sizes).to(device)

    def make_batch() -> tuple[Tensor, Tensor]:
        tokens = torch.randint(vocab, (batch, length + 1), device=device)
        return tokens[:, :-1], tokens[:, 1:]

    return model, make_batch, _cross_entropy


def _bert(device: torch.device, batch: int, sizes: Mapping[str, int]) -> Untrained:
    vocab, length = sizes["vocab"], sizes["length"]
    transformers = importlib.import_module("transformers")
    config = transformers.BertConfig(
        vocab_size=vocab,
        hidden_size=sizes["width"],
        num_hidden_layers=sizes["depth"],
        num_attention_heads=sizes["heads"],
        intermediate_size=4 * sizes["width"],
        max_position_embeddings=length,
        num_labels=2,
    )
    model: nn.Module = transformers.BertForSequenceClassification(config).to(device)

    def make_batch() -> dict[str, Tensor]:
        tokens, labels = torch.randint(vocab, (batch, length), device=device), torch.randint(2, (batch,), device=device)
        return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": labels}

    def compute_loss(model: Any, inputs: dict[str, Tensor]) -> Tensor:
        loss: Tensor = model(**inputs).loss
        return loss

    return model, make_batch, compute_loss


_BUILDERS: Mapping[str, Callable[[torch.device, int, Mapping[str, int]], Untrained]] = {
    "mlp": _mlp,
    "gpt": _gpt,
    "bert": _bert,
}


def _spec(module: str) -> ModuleSpec | None:
    try:
        return importlib.util.find_spec(module)
    except ModuleNotFoundError:  # the package that it is in does not exist
        return None


def _own(factory: str, optimizer_name: str | None, batch: int, device: torch.device) -> Workload:
    made = _function(factory)(batch, device)
    if not (isinstance(made, tuple) and len(made) == 4 and isinstance(made[0], nn.Module)):
        raise BenchError(
            f"--factory {factory} must return (model, optimizer or None, make_batch, compute_loss); it returned "
            f"{type(made).__name__}{f' of {len(made)}' if isinstance(made, tuple) else ''}. "
            "`python -c 'import gradsync.bench; help(gradsync.bench)'` shows one."
        )
    model, optimizer, make_batch, compute_loss = made
    if optimizer is not None and optimizer_name is not None:
        raise BenchError(
            f"--factory {factory} brings its own optimizer, {type(optimizer).__name__}, so --optimizer has no meaning "
            "beside it; leave it out, or let the factory return None."
        )
    return Workload(model, optimizer or _optimizer(optimizer_name, model), make_batch, compute_loss)


def _function(factory: str) -> Callable[[int, torch.device], Any]:
    module, _, name = factory.partition(":")
    function = getattr(importlib.import_module(module), name, None)
    if not callable(function):
        raise BenchError(f"--factory {factory} must name a function; what {module} holds by that name is {function!r}.")
    return function  # type: ignore[no-any-return]


def _optimizer(name: str | None, model: nn.Module) -> torch.optim.Optimizer:
    return OPTIMIZERS[name or next(iter(OPTIMIZERS))](p for p in model.parameters() if p.requires_grad)


def _cross_entropy(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
    inputs, targets = batch
    return nn.functional.cross_entropy(model(inputs), targets)
