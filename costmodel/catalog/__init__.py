"""The catalogue: devices.yaml, instances.yaml and defaults.yaml read into SI values. Datasheet peaks only; efficiency lives in costmodel.profiles.

Memory is what nvidia-smi shows where known (`memory_visible_mib`), else the marketed size. A link without its own latency takes the default of its kind;
the source of each default stands beside it in defaults.yaml.

Fast link kinds: nvswitch (every pair at full rate), nvlink-mesh and xgmi-mesh (point-to-point links: a pair gets only its own), pcie,
pcie-staged (no peer-to-peer: through host memory), loopback (CPU ranks).
Network kinds: infiniband, roce, efa, tcpx, tcp. Host link kinds: pcie, nvlink-c2c, memory.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Any

import yaml

from costmodel.hardware import Device, Link, NodePool
from costmodel.units import GB, GIB, MIB, MILLION, TB, TERA
from costmodel.work import DTYPE_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceRow:
    """One accelerator of the catalogue.

    `fast_domain` is the size of an NVLink domain that does not end at the host (NVL72), else 0. `usual_devices_per_node` is how many a host of it
    usually holds; `host_like` names the instance whose host and network stand in when only the device is named. `caveat` is what its user must know.
    """

    device: Device
    aliases: tuple[str, ...]
    fast_link: Link
    host_link: Link
    fast_domain: int
    usual_devices_per_node: int
    host_like: str
    confidence: str
    sources: tuple[str, ...]
    caveat: str = ""
    remarks: str = ""
    design_watts: float = 0.0

    @property
    def name(self) -> str:
        """The name people use: the first alias."""
        return self.aliases[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceRow:
    """One host or cloud instance: `pool` holds a single node of it; its prices are per hour and node."""

    pool: NodePool
    provider: str
    vcpus: int
    fast_domain: int
    confidence: str
    sources: tuple[str, ...]
    remarks: str = ""
    storage_assumed: bool = True
    network_assumed: bool = False

    @property
    def instance_id(self) -> str:
        """The provider's name."""
        return self.pool.instance


@dataclass(frozen=True, slots=True, kw_only=True)
class Catalog:
    """All rows, the other meanings of ambiguous names, and the defaults."""

    devices: tuple[DeviceRow, ...]
    instances: tuple[InstanceRow, ...]
    ambiguous: tuple[tuple[str, tuple[str, ...]], ...]
    defaults: Mapping[str, Any]

    def device(self, name: str) -> DeviceRow | None:
        """The row whose id or alias is `name`, whatever its case and punctuation; None when there is none."""
        key = name_key(name)
        return next((row for row in self.devices if key in {name_key(alias) for alias in (row.device.device_id, *row.aliases)}), None)

    def instance(self, name: str) -> InstanceRow | None:
        """The instance called `name`, whatever its case and punctuation; None when there is none."""
        key = name_key(name)
        return next((row for row in self.instances if name_key(row.instance_id) == key), None)

    def others(self, name: str) -> tuple[str, ...]:
        """What else `name` could have meant: ("A100-80GB", ...) for "A100", () when it is plain."""
        key = name_key(name)
        return next((others for alias, others in self.ambiguous if name_key(alias) == key), ())

    def link(self, kind: str, bandwidth_bytes_per_s: float, latency_s: float | None = None) -> Link:
        """A link with the default latency of its kind unless one is given."""
        return make_link(self.defaults, kind, bandwidth_bytes_per_s, latency_s)


def name_key(name: str) -> str:
    """Names are compared by their letters and digits, without the vendor: "NVIDIA A100-SXM4-40GB" is "a100sxm440gb"."""
    return re.sub(r"nvidia|geforce|tesla|amd |instinct|[^a-z0-9.]", "", name.lower())


def load_catalog() -> Catalog:
    """Read the catalogue (about 20 ms with libyaml). Nothing is cached: keep the value where you need it more than once."""
    hosts, accelerators, defaults = (read_table(name) for name in ("instances.yaml", "devices.yaml", "defaults.yaml"))
    devices = tuple(_device_row(row, defaults) for row in accelerators["devices"])
    by_id = {row.device.device_id: row for row in devices}
    instances = tuple(_instance_row(row, by_id[row["device"]], defaults) for row in hosts["instances"])
    ambiguous = tuple((name, tuple(others)) for name, others in accelerators["ambiguous"].items())
    return Catalog(devices=devices, instances=instances, ambiguous=ambiguous, defaults=defaults)


def read_table(name: str) -> dict[str, Any]:
    """One file of the catalogue as plain data, by yaml's safe loader (the C one where there is one: 15 ms against 90)."""
    text = resources.files("costmodel.catalog").joinpath(name).read_text(encoding="utf-8")
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)(text)
    try:
        table: dict[str, Any] = loader.get_single_data()
    finally:
        loader.dispose()
    return table


def make_link(defaults: Mapping[str, Any], kind: str, bandwidth_bytes_per_s: float, latency_s: float | None = None) -> Link:
    """See Catalog.link."""
    if latency_s is None:
        latencies = defaults["latency_us"]
        latency_s = latencies.get(kind, latencies["tcp"])["value"] / MILLION
    return Link(kind=kind, bandwidth_bytes_per_s=bandwidth_bytes_per_s, latency_s=latency_s)


def _device_row(row: Mapping[str, Any], defaults: Mapping[str, Any]) -> DeviceRow:
    visible = row["memory_visible_mib"]
    device = Device(
        device_id=row["id"],
        arch=row["arch"],
        memory_bytes=float(visible * MIB) if visible else row["memory_gb"] * GB,
        memory_bandwidth_bytes_per_s=row["memory_bandwidth_gb_per_s"] * GB,
        peak_flops=tuple((dtype, float(round(rate * TERA))) for dtype, rate in row["dense_tflop_per_s"].items() if dtype in DTYPE_BYTES),
        kind=row["kind"],
        source=f"catalogue {', '.join(row['sources'])} ({row['confidence']})",
    )
    pcie = row["pcie"]["gb_per_s_per_direction"] * GB if row["pcie"] else 0.0
    return DeviceRow(
        device=device,
        aliases=tuple(row["aliases"]),
        fast_link=_fast_link(row["fast_link"], pcie, defaults),
        host_link=_host_link(row.get("host_link"), pcie, defaults),
        fast_domain=row["fast_domain_devices"] or 0,
        usual_devices_per_node=row["usual_devices_per_node"],
        host_like=row["host_like"],
        confidence=row["confidence"],
        sources=tuple(row["sources"]),
        caveat=row.get("caveat", ""),
        remarks=row.get("remarks", ""),
        design_watts=float(row.get("tdp_w") or 0.0),
    )


def _fast_link(row: Mapping[str, Any], pcie: float, defaults: Mapping[str, Any]) -> Link:
    rate = row.get("gb_per_s_per_direction")
    bandwidth = rate * GB if rate else pcie * (defaults["staged_pcie_frac"]["value"] if row["kind"] == "pcie-staged" else 1.0)
    latency = row["latency_us"]
    return make_link(defaults, row["kind"], bandwidth, None if latency is None else latency / MILLION)


def _host_link(row: Mapping[str, Any] | None, pcie: float, defaults: Mapping[str, Any]) -> Link:
    kind, bandwidth = (row["kind"], row["gb_per_s_per_direction"] * GB) if row else ("pcie", pcie)
    latency = (row or {}).get("latency_us", defaults["latency_us"]["host"]["value"])
    return Link(kind=kind, bandwidth_bytes_per_s=bandwidth, latency_s=latency / MILLION)


def _instance_row(row: Mapping[str, Any], device: DeviceRow, defaults: Mapping[str, Any]) -> InstanceRow:
    network, count = row["network"], row["devices"]
    fallback = defaults["network"]
    rate = network["gb_per_s_per_device_per_direction"] * GB if network else fallback["gbit_per_s_per_node"] * GB / 8 / count
    lanes_frac = row.get("pcie_lanes", 16) / 16
    storage = defaults["storage"]
    terabytes = row["storage_tb"]
    pool = NodePool(
        device=device.device,
        num_nodes=1,
        devices_per_node=count,
        fast_domain=min(count, row["fast_domain_devices"]),
        fast_link=_narrowed(device.fast_link, lanes_frac),
        network=make_link(defaults, network["kind"] if network else fallback["kind"], rate),
        host_link=_narrowed(device.host_link, lanes_frac),
        host_memory_bytes=float(row["host_memory_gib"] * GIB),
        storage_bytes=terabytes * TB if terabytes else 0.0,
        storage_read_bytes_per_s=storage["read_gb_per_s"] * GB if terabytes else 0.0,
        storage_write_bytes_per_s=storage["write_gb_per_s"] * GB if terabytes else 0.0,
        usd_per_hour=row["usd_per_hour"],
        instance=row["id"],
    )
    return InstanceRow(
        pool=pool,
        provider=row["provider"],
        vcpus=row["vcpus"],
        fast_domain=row["fast_domain_devices"],
        confidence=row["confidence"],
        sources=tuple(row["sources"]),
        remarks=row.get("remarks", ""),
        storage_assumed=bool(terabytes),
        network_assumed=network is None,
    )


def _narrowed(link: Link, frac: float) -> Link:
    """A PCIe link on fewer lanes; other links do not run over them."""
    scale = frac if link.kind.startswith("pcie") else 1.0
    return Link(kind=link.kind, bandwidth_bytes_per_s=link.bandwidth_bytes_per_s * scale, latency_s=link.latency_s)
