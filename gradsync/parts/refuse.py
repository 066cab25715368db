"""Raises where a call cannot be cut, or not exactly."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

import torch
from torch import nn
from torch.autograd.graph import Node
from torch.nn.modules.batchnorm import _BatchNorm

from gradsync._errors import GradSyncError
from gradsync.engines import Engine


def check_models(models: Iterable[nn.Module]) -> None:
    """Raise for a BatchNorm that normalises by its rows: its output for a row depends on the other rows."""
    for model in models:
        for name, module in model.named_modules():
            if not isinstance(module, _BatchNorm):
                continue
            has_statistics = module.running_mean is not None and module.running_var is not None
            if module.training or not has_statistics:
                raise GradSyncError(
                    "fit runs a micro-batch in parts where it does not fit in memory, and the parts must add up to the "
                    f"whole, but {name or 'the model'} is a {type(module).__name__} "
                    f"{'in training' if module.training else 'without running statistics'}, which normalises by the "
                    "rows that it sees together. Use GroupNorm or LayerNorm, "
                    f"{'call eval() on it, ' if has_statistics else ''}or leave fit out."
                )


def check_engines(engines: Iterable[Engine]) -> None:
    """Raise if this rank cannot run more forwards than other ranks, for instance because they take part in each."""
    for engine in engines:
        ddp = getattr(engine, "_ddp", None)
        if ddp is not None and ddp._modules and (engine.is_compiled or ddp._use_python_reducer or ddp.mixed_precision):
            raise GradSyncError(
                "fit runs a micro-batch in parts where it does not fit in memory, which takes forwards while a "
                "synchronisation is under way, but this DistributedDataParallel is compiled, or casts its parameters "
                "in its forward (mixed_precision). Hand gradsync the bare model, compiled or under autocast, or leave "
                "fit out."
            )
        if getattr(ddp, "static_graph", False):
            raise GradSyncError(
                "fit runs a micro-batch in parts where it does not fit in memory, but a DistributedDataParallel with "
                "static_graph=True counts on the same backward each time. Leave static_graph or fit out."
            )
        if engine.forward_communicates or engine.holds_inside or engine.twins:
            raise GradSyncError(
                "fit runs a micro-batch in parts on the rank where it does not fit in memory, without the others, but "
                f"the forward of {type(engine).__name__.removesuffix('Engine')} communicates, so that all ranks must "
                "run equally many. Leave fit out, and look for a size that fits in advance, on all ranks together: "
                "gradsync.functional.rows_that_fit(model, function, most=...)."
            )


def check_graph(loss: torch.Tensor, parameters: Collection[torch.Tensor]) -> None:
    """Raise for what a backward in parts cannot handle: reentrant checkpoints, and parameters not in `parameters`."""
    known = set(map(id, parameters))
    for node in _nodes(loss):
        if node.name().rpartition(".")[2] == "CheckpointFunctionBackward":
            raise GradSyncError(
                "fit needs to know which gradients have arrived when a backward runs out of memory, but a reentrant "
                "checkpoint runs backwards inside a backward. Pass use_reentrant=False to torch.utils.checkpoint, or "
                "leave fit out."
            )
        leaf = getattr(node, "variable", None)  # of an AccumulateGrad
        if isinstance(leaf, nn.Parameter) and id(leaf) not in known:
            raise GradSyncError(
                "fit gives gradients in parts to the parameters that it knows, but the loss also depends on a "
                f"parameter of shape {tuple(leaf.shape)} that belongs to none of the call's models or optimizers. "
                "Pass its model or its optimizer, or call requires_grad_(False) on it."
            )


def _nodes(loss: torch.Tensor) -> Iterator[Node]:
    todo = [loss.grad_fn] if loss.grad_fn is not None else []
    seen = set(todo)
    while todo:
        node = todo.pop()
        yield node
        for after, _ in node.next_functions:
            if after is not None and after not in seen:
                seen.add(after)
                todo.append(after)
