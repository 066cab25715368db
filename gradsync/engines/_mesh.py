"""The process groups of a device mesh that parameters are sharded and replicated on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch.distributed.fsdp._fully_shard._fsdp_common import DDPMeshInfo, FSDPMeshInfo

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

# The description by which gradsync finds a group of its own among torch's groups.
_DESCRIPTION = "gradsync: the ranks of both dimensions of a mesh"


def one_dimension(groups: Sequence[FSDPParamGroup]) -> dist.ProcessGroup:
    """The ranks along one of the mesh's dimensions."""
    if not groups:  # a module without parameters
        assert dist.group.WORLD is not None, "fully_shard needs it"
        return dist.group.WORLD
    info = groups[0].mesh_info
    if isinstance(info, FSDPMeshInfo):
        return info.shard_process_group
    assert isinstance(info, DDPMeshInfo), "sharded or replicated"
    return info.replicate_process_group


def whole_group(groups: Sequence[FSDPParamGroup]) -> dist.ProcessGroup | None:
    """The group of all ranks along both of HSDP's dimensions, made once; None if there is only one dimension.

    Making it is collective over these ranks. torch keeps a group until it is destroyed, so that later engines on the
    same mesh find the group that the first engine made.
    """
    info = groups[0].mesh_info if groups else None
    if not (isinstance(info, FSDPMeshInfo) and isinstance(info, DDPMeshInfo)):
        return None
    ranks = sorted(info.mesh.mesh.flatten().tolist())
    if ranks == list(range(dist.get_world_size())):
        return dist.group.WORLD
    for group in dist.distributed_c10d._world.pg_map:
        if group.group_desc == _DESCRIPTION and sorted(dist.get_process_group_ranks(group)) == ranks:
            return group
    made = dist.new_group(ranks, use_local_synchronization=True, group_desc=_DESCRIPTION)
    assert isinstance(made, dist.ProcessGroup), "this rank is one of them"
    return made


def other_dimensions(groups: Sequence[FSDPParamGroup]) -> list[dist.ProcessGroup]:
    """The groups of the mesh dimensions that parameters have beside the data-parallel dimensions."""
    found: dict[dist.ProcessGroup, None] = {}
    for group in groups:
        mine = set(group.mesh_info.mesh.mesh_dim_names or ())
        for param in group.fsdp_params:
            sharded: Any = param.sharded_param  # a DTensor
            mesh = sharded.device_mesh
            for dimension, name in enumerate(mesh.mesh_dim_names or ()):
                if name not in mine:
                    found[mesh.get_group(dimension)] = None
    return list(found)
