"""Devices, links and clusters as plain data: SI units, one direction per bandwidth, peaks dense (no sparsity)."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A connection: `bandwidth_bytes_per_s` per direction and per device, start-up `latency_s`, and how it is wired (`kind`)."""

    kind: str
    bandwidth_bytes_per_s: float
    latency_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One accelerator (or one CPU rank). `peak_flops` maps a dtype of costmodel.work.DTYPE_BYTES to dense flops per second.

    `power_frac`: its power limit over the power the device was designed for; matmuls slow down with it (costmodel.compute).
    """

    device_id: str
    arch: str
    memory_bytes: float
    memory_bandwidth_bytes_per_s: float
    peak_flops: tuple[tuple[str, float], ...]
    kind: str = "gpu"
    source: str = ""
    power_frac: float = 1.0

    def peak(self, dtype: str) -> float:
        """Dense peak flops per second of `dtype`, 0.0 when the device has no unit for it."""
        return dict(self.peak_flops).get(dtype, 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodePool:
    """`num_nodes` equal hosts of `devices_per_node` devices.

    `fast_link` joins the `fast_domain` devices of one NVLink (or PCIe) domain, which may be smaller or larger than a host;
    `network` joins hosts (per-device share of the cards); `host_link` joins a device to host memory.
    """

    device: Device
    num_nodes: int
    devices_per_node: int
    fast_domain: int
    fast_link: Link
    network: Link
    host_link: Link
    host_memory_bytes: float
    storage_bytes: float = 0.0
    storage_read_bytes_per_s: float = 0.0
    storage_write_bytes_per_s: float = 0.0
    usd_per_hour: float | None = None
    instance: str = ""

    @property
    def num_devices(self) -> int:
        """Devices in the pool."""
        return self.num_nodes * self.devices_per_node


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """One or more pools. `notes` are the assumptions made while reading the user's text (which A100 was taken, ...)."""

    name: str
    pools: tuple[NodePool, ...]
    notes: tuple[str, ...] = field(default=())

    @classmethod
    def parse(cls, text: str | Path) -> Cluster:
        """The cluster that `text` names: "8xH100*4", "p5.48xlarge*2", "local:4", a file. See costmodel.clusters. Raises InputError."""
        from costmodel.clusters import parse_cluster

        return parse_cluster(text)

    @property
    def num_devices(self) -> int:
        """Devices in all pools."""
        return sum(pool.num_devices for pool in self.pools)

    @property
    def pool(self) -> NodePool:
        """The only pool of a homogeneous cluster, the first of a mixed one."""
        return self.pools[0]
