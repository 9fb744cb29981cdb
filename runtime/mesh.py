"""The device mesh of a plan: one process a device, axes in plan order (pp, dp_replicate, dp_shard, cp, tp), so that tp neighbours are adjacent ranks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from costmodel.errors import InputError
from costmodel.mesh import AXES, Mesh

DATA_AXES = ("dp_replicate", "dp_shard")


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """This process in the mesh: its device, the torch mesh, and its index along pipeline, data and tensor axes.

    data_mesh is the flattened dp_replicate x dp_shard axis: data_index says which part of the global batch this rank trains on.
    """

    device: torch.device
    mesh: DeviceMesh
    data_mesh: DeviceMesh
    pipeline_index: int
    data_index: int
    tensor_index: int

    def axis(self, name: str) -> DeviceMesh:
        """The one-dimensional mesh of `name`."""
        return self.mesh[name]


def build_mesh(mesh: Mesh, device: torch.device) -> Place:
    """The mesh over all processes of the default group, which must exist. Raises InputError when their number is not the plan's."""
    world = dist.get_world_size()
    if world != mesh.num_devices:
        raise InputError(
            f"the plan needs {mesh.num_devices} ranks, {world} are running", where="Plan.strategy.mesh", remedy="start as many as it needs"
        )
    shape = tuple(mesh.size(axis) for axis in AXES)
    device_mesh = init_device_mesh(device.type, shape, mesh_dim_names=AXES)
    data_mesh = device_mesh[DATA_AXES]._flatten("dp")
    return Place(
        device=device,
        mesh=device_mesh,
        data_mesh=data_mesh,
        pipeline_index=device_mesh.get_local_rank("pp"),
        data_index=data_mesh.get_local_rank(),
        tensor_index=device_mesh.get_local_rank("tp"),
    )


def local_device(local_rank: int) -> torch.device:
    """The GPU of this local rank where there is one, else the CPU."""
    return torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
