"""One small model on every engine: the columns of the tables in tests/engines and tests/uneven."""

from __future__ import annotations

import warnings
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from tests.support.models import net


@dataclass
class Home:
    """A model on its engine, and where this rank stands among those that see different data."""

    model: nn.Module
    rank: int = 0
    size: int = 1
    options: dict = field(default_factory=dict)
    scaler: type | None = None
    inside: nn.Module | None = None
    foreach: bool | None = None

    @property
    def net(self) -> nn.Module:
        return self.inside or getattr(self.model, "module", self.model)

    def full(self) -> dict[str, torch.Tensor]:
        """All parameters, whole, by their names in a bare Net."""
        with gathered(self.model):
            return {
                clean(name): (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone()
                for name, p in self.net.named_parameters()
                if "_flat_param" not in name
            }


def clean(name: str) -> str:
    return name.replace("_fsdp_wrapped_module.", "").replace("_orig_mod.", "").removeprefix("module.")


@contextmanager
def gathered(model):
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

    if any(isinstance(module, FSDP) for module in model.modules()):
        with FSDP.summon_full_params(model, writeback=False):
            yield
    else:
        yield


# Meshes and groups are made once a process: a pool of ranks runs many cases.
_MESHES: dict[tuple, object] = {}


def mesh(shape, names):
    from torch.distributed.device_mesh import init_device_mesh

    if (shape, names) not in _MESHES:
        _MESHES[shape, names] = init_device_mesh("cpu", shape, mesh_dim_names=names)
    return _MESHES[shape, names]


def _plain(model: nn.Module, **options) -> Home:
    return Home(model, dist.get_rank(), dist.get_world_size(), options)


def _ddp(**kwargs):
    return lambda model: _plain(DDP(model, **kwargs))


def _replicate(model: nn.Module) -> Home:
    from torch.distributed._composable.replicate import replicate

    return _plain(replicate(model))


def _replicate_fsdp(model: nn.Module) -> Home:
    from torch.distributed._composable.replicate_with_fsdp import replicate

    world = mesh((dist.get_world_size(),), ("data",))
    for block in (model.first, model.second):
        replicate(block, mesh=world)
    return _plain(replicate(model, mesh=world))


def _fsdp2(root=True, shape=None, reshard_backward=True, options=None, **kwargs):
    def make(model: nn.Module) -> Home:
        from torch.distributed.fsdp import fully_shard

        names = ("replicas", "shards") if shape else ("data",)
        where = mesh(shape or (dist.get_world_size(),), names)
        blocks = (model.first, model.second)
        for block in blocks:
            fully_shard(block, mesh=where, **kwargs)
        if root:
            fully_shard(model, mesh=where, **kwargs)
        for block in () if reshard_backward else (*blocks, model):
            block.set_reshard_after_backward(False, recurse=False)
        home = _plain(model, **(options or {}))
        home.foreach = None if root else False  # plain parameters beside DTensors: torch's foreach kernels refuse
        return home

    return make


def tensor_parallel(model: nn.Module, **data: int) -> Home:
    """On pairs of ranks, beside one dimension or two of the mesh for FSDP2, by their names."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    whole = mesh((*data.values(), 2), (*data, "tensor"))
    for block in (model.first, model.second):
        parallelize_module(block, whole["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fully_shard(block, mesh=whole[tuple(data)])
    fully_shard(model, mesh=whole[tuple(data)])
    home = Home(model, dist.get_rank() // 2, dist.get_world_size() // 2)
    home.foreach = False  # two meshes in one optimizer
    return home


def _ddp_around_fsdp2(model: nn.Module) -> Home:
    """The first block sharded, and DDP for the rest."""
    from torch.distributed.fsdp import fully_shard

    fully_shard(model.first, mesh=mesh((dist.get_world_size(),), ("data",)))
    model._ddp_params_and_buffers_to_ignore = [f"first.{name}" for name, _ in model.first.named_parameters()]
    home = _plain(DDP(model))
    home.foreach = False
    return home


def _fsdp1(strategy: str, use_orig_params: bool, root: bool = True):
    def make(model: nn.Module) -> Home:
        from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
        from torch.distributed.fsdp import ShardingStrategy
        from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

        options = {
            "sharding_strategy": ShardingStrategy[strategy],
            "use_orig_params": use_orig_params,
            "device_id": torch.device("cpu"),
        }
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model.first = FSDP(model.first, **options)
            model.second = FSDP(model.second, **options)
            home = _plain(FSDP(model, **options) if root else model)
        home.scaler = ShardedGradScaler
        return home

    return make


# name: (ranks, how the model gets there)
HOMES = {
    "none": (1, Home),
    "bare": (2, _plain),
    "ddp": (2, _ddp()),
    "ddp_find_unused": (2, _ddp(find_unused_parameters=True)),
    "replicate": (2, _replicate),
    "replicate_fsdp": (2, _replicate_fsdp),
    "fsdp1_full": (2, _fsdp1("FULL_SHARD", False)),
    "fsdp1_full_orig": (2, _fsdp1("FULL_SHARD", True)),
    "fsdp1_grad_op": (2, _fsdp1("SHARD_GRAD_OP", False)),
    "fsdp1_grad_op_orig": (2, _fsdp1("SHARD_GRAD_OP", True)),
    "fsdp1_no_shard": (2, _fsdp1("NO_SHARD", False)),
    "fsdp1_no_shard_orig": (2, _fsdp1("NO_SHARD", True)),
    "fsdp1_no_root": (2, _fsdp1("FULL_SHARD", True, root=False)),
    "fsdp2": (2, _fsdp2()),
    "fsdp2_each": (2, _fsdp2(options={"sync": "each"})),
    "fsdp2_gathered": (2, _fsdp2(reshard_after_forward=False, reshard_backward=False)),
    "fsdp2_no_root": (2, _fsdp2(root=False)),
    "ddp_fsdp2": (2, _ddp_around_fsdp2),
    "hsdp_window": (4, _fsdp2(shape=(2, 2))),
    "hsdp_shard": (4, _fsdp2(shape=(2, 2), options={"sync": "shard"})),
    "hsdp_each": (4, _fsdp2(shape=(2, 2), options={"sync": "each"})),
    "fsdp2_tp": (4, lambda model: tensor_parallel(model, data=2)),
}


def home_of(engine: str, **kwargs) -> Home:
    return HOMES[engine][1](net(**kwargs))
