"""One small model on every engine: the columns of the table."""

from __future__ import annotations

import inspect
import warnings
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from gradsync._state import MESHES
from gradsync.verify.models import net

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh

CPU = torch.device("cpu")


@dataclass
class Home:
    """A model on its engine, and this rank's place among the ranks that see different data.

    `tolerance` is how far parameters may be off, which depends on their dtype.
    """

    model: Any
    rank: int = 0
    size: int = 1
    options: dict[str, Any] = field(default_factory=dict)
    scaler: type[Any] | None = None
    inside: nn.Module | None = None
    foreach: bool | None = None
    tolerance: float = 1e-10

    @property
    def net(self) -> nn.Module:
        """The model inside the engine's wrapper."""
        inside: nn.Module = self.inside or getattr(self.model, "module", self.model)
        return inside

    @property
    def device(self) -> torch.device:
        """The device of its parameters."""
        found: torch.device = next(iter(self.model.parameters())).device
        return found

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of its parameters."""
        found: torch.dtype = next(iter(self.model.parameters())).dtype
        return found

    def make_scaler(self) -> Any:
        """A GradScaler that suits the engine."""
        return (self.scaler or torch.amp.GradScaler)(self.device.type, init_scale=4.0)

    def full(self) -> dict[str, torch.Tensor]:
        """All parameters, whole, by their names in a bare Net."""
        with gathered(self.model):
            return {
                clean(name): _whole(p).detach().clone()
                for name, p in self.net.named_parameters()
                if "_flat_param" not in name
            }


def clean(name: str) -> str:
    """A parameter's name, without the prefixes of wrappers."""
    return name.replace("_fsdp_wrapped_module.", "").replace("_orig_mod.", "").removeprefix("module.")


@contextmanager
def gathered(model: nn.Module) -> Iterator[None]:
    """Inside, parameters that FSDP1 has sharded are whole."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    if any(isinstance(module, FullyShardedDataParallel) for module in model.modules()):
        with FullyShardedDataParallel.summon_full_params(model, writeback=False):
            yield
    else:
        yield


def mesh(shape: tuple[int, ...], names: tuple[str, ...], device: torch.device = CPU) -> DeviceMesh:
    """A mesh of all ranks."""
    from torch.distributed.device_mesh import init_device_mesh

    key = shape, names, device.type
    made: DeviceMesh = MESHES.get(key) or init_device_mesh(device.type, shape, mesh_dim_names=names)
    MESHES[key] = made
    return made


def _plain(model: nn.Module, **options: Any) -> Home:
    return Home(model, dist.get_rank(), dist.get_world_size(), options)


def _ddp(**kwargs: Any) -> Callable[[Any], Home]:
    return lambda model: _plain(DistributedDataParallel(model, **kwargs))


def _replicate(model: nn.Module) -> Home:
    from torch.distributed._composable.replicate import replicate

    return _plain(replicate(model))


def _whole_world(model: nn.Module) -> DeviceMesh:
    return mesh((dist.get_world_size(),), ("data",), _device_of(model))


def _device_of(model: nn.Module) -> torch.device:
    return next(iter(model.parameters())).device


def _replicate_fsdp(model: Any) -> Home:
    from torch.distributed._composable.replicate_with_fsdp import replicate

    options: dict[str, Any] = {"mesh": _whole_world(model)}
    if "mesh" not in inspect.signature(replicate).parameters:  # torch 2.9: another name, and two dimensions
        pairs = mesh((dist.get_world_size(), 1), ("replicas", "shards"), _device_of(model))
        options = {"device_mesh": pairs}
    for block in (model.first, model.second):
        replicate(block, **options)
    return _plain(replicate(model, **options))


def _fsdp2(
    *,
    root: bool = True,
    replicas: int = 1,
    reshard_backward: bool = True,
    options: dict[str, Any] | None = None,
    **kwargs: Any,
) -> Callable[[Any], Home]:
    def make(model: Any) -> Home:
        from torch.distributed.fsdp import fully_shard

        where = _whole_world(model)
        if replicas > 1:
            shape = replicas, dist.get_world_size() // replicas
            where = mesh(shape, ("replicas", "shards"), _device_of(model))
        blocks = (model.first, model.second)
        for block in blocks:
            fully_shard(block, mesh=where, **kwargs)
        if root:
            fully_shard(model, mesh=where, **kwargs)
        for block in () if reshard_backward else (*blocks, model):
            block.set_reshard_after_backward(reshard_after_backward=False, recurse=False)
        home = _plain(model, **(options or {}))
        home.foreach = None if root else False  # plain parameters beside DTensors: torch's foreach kernels refuse
        return home

    return make


def tensor_parallel(model: Any, **data: int) -> Home:
    """Tensor parallelism on pairs of ranks, and FSDP2 on one or two more mesh dimensions, in `data` by name."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    whole = mesh((*data.values(), 2), (*data, "tensor"), _device_of(model))
    for block in (model.first, model.second):
        parallelize_module(block, whole["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fully_shard(block, mesh=whole[tuple(data)])
    fully_shard(model, mesh=whole[tuple(data)])
    home = Home(model, dist.get_rank() // 2, dist.get_world_size() // 2)
    home.foreach = False  # two meshes in one optimizer
    return home


def _ddp_around_fsdp2(model: Any) -> Home:
    """The first block sharded, and DDP for the rest."""
    from torch.distributed.fsdp import fully_shard

    fully_shard(model.first, mesh=_whole_world(model))
    model._ddp_params_and_buffers_to_ignore = [f"first.{name}" for name, _ in model.first.named_parameters()]
    home = _plain(DistributedDataParallel(model))
    home.foreach = False
    return home


def _fsdp1(strategy: str, *, use_orig_params: bool, root: bool = True) -> Callable[[Any], Home]:
    def make(model: Any) -> Home:
        from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
        from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

        def wrap(module: nn.Module) -> nn.Module:
            return FullyShardedDataParallel(
                module,
                sharding_strategy=ShardingStrategy[strategy],
                use_orig_params=use_orig_params,
                device_id=device,
            )

        device = _device_of(model)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model.first = wrap(model.first)
            model.second = wrap(model.second)
            home = _plain(wrap(model) if root else model)
        home.scaler = ShardedGradScaler
        return home

    return make


class Column(NamedTuple):
    """An engine in the table: how many ranks it needs, what puts the model on it, and its title."""

    ranks: int
    make: Callable[[Any], Home]
    title: str
    is_variant: bool = False  # of another column; tried with --full


HOMES: dict[str, Column] = {
    "none": Column(1, Home, "one process"),
    "bare": Column(2, _plain, "bare, DDP behind"),
    "ddp": Column(2, _ddp(), "DDP"),
    "ddp_find_unused": Column(2, _ddp(find_unused_parameters=True), "DDP, find_unused"),
    "ddp_views": Column(2, _ddp(gradient_as_bucket_view=True), "DDP, bucket views"),
    "ddp_static": Column(2, _ddp(static_graph=True), "DDP, static graph"),
    "replicate": Column(2, _replicate, "replicate"),
    "replicate_fsdp": Column(2, _replicate_fsdp, "replicate (FSDP)"),
    "fsdp1_full": Column(2, _fsdp1("FULL_SHARD", use_orig_params=False), "FSDP1, flat", is_variant=True),
    "fsdp1_full_orig": Column(2, _fsdp1("FULL_SHARD", use_orig_params=True), "FSDP1"),
    "fsdp1_grad_op": Column(
        2, _fsdp1("SHARD_GRAD_OP", use_orig_params=False), "FSDP1, SHARD_GRAD_OP, flat", is_variant=True
    ),
    "fsdp1_grad_op_orig": Column(
        2, _fsdp1("SHARD_GRAD_OP", use_orig_params=True), "FSDP1, SHARD_GRAD_OP", is_variant=True
    ),
    "fsdp1_no_shard": Column(2, _fsdp1("NO_SHARD", use_orig_params=False), "FSDP1, NO_SHARD, flat", is_variant=True),
    "fsdp1_no_shard_orig": Column(2, _fsdp1("NO_SHARD", use_orig_params=True), "FSDP1, NO_SHARD", is_variant=True),
    "fsdp1_no_root": Column(
        2, _fsdp1("FULL_SHARD", use_orig_params=True, root=False), "FSDP1, bare root", is_variant=True
    ),
    "fsdp2": Column(2, _fsdp2(), "FSDP2"),
    "fsdp2_each": Column(2, _fsdp2(options={"sync": "each"}), 'FSDP2, "each"', is_variant=True),
    "fsdp2_gathered": Column(
        2, _fsdp2(reshard_after_forward=False, reshard_backward=False), "FSDP2, kept gathered", is_variant=True
    ),
    "fsdp2_no_root": Column(2, _fsdp2(root=False), "FSDP2, bare root", is_variant=True),
    "ddp_fsdp2": Column(2, _ddp_around_fsdp2, "DDP + FSDP2", is_variant=True),
    "hsdp_window": Column(4, _fsdp2(replicas=2), "HSDP"),
    "hsdp_shard": Column(4, _fsdp2(replicas=2, options={"sync": "shard"}), 'HSDP, "shard"', is_variant=True),
    "hsdp_each": Column(4, _fsdp2(replicas=2, options={"sync": "each"}), 'HSDP, "each"', is_variant=True),
    "fsdp2_tp": Column(
        4, lambda model: tensor_parallel(model, data=dist.get_world_size() // 2), "FSDP2 x TP", is_variant=True
    ),
}


def home_of(engine: str, *, device: torch.device = CPU, **kwargs: Any) -> Home:
    """A new model on an engine; in float64, or in float32 on mps, which has no float64."""
    if device.type != "mps":
        return HOMES[engine].make(net(**kwargs).to(device))
    home = HOMES[engine].make(net(torch.float32, **kwargs).to(device))
    home.tolerance = 1e-4
    return home


def _whole(parameter: Any) -> torch.Tensor:
    """A parameter that may be a DTensor, on this rank."""
    whole: torch.Tensor = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
    return whole
