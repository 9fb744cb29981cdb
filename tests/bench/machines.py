"""A row's `cluster` -> Cluster: the catalogue's device, with what the row's own words add (memory size, network rate). Parsed once per text."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from costmodel.clusters import find_device
from costmodel.errors import InputError
from costmodel.hardware import Cluster, NodePool

GIGABIT_PER_S = 1e9 / 8
# Line rate of one card or link by the generation that a text names, Gbit/s.
MEMORY_STACKS = {"hbm2e": (16, 408e9)}  # GB and bytes per second of one stack: 3.2 Gbit/s on 1,024 pins
LINK_GENERATIONS = {"omni-path": 100.0, "omnipath": 100.0, "edr": 100.0, "hdr": 200.0, "ndr": 400.0, "xdr": 800.0}
# Fabrics of one cloud each, and the latency of InfiniBand (costmodel/catalog/defaults.yaml).
CLOUD_FABRICS = ("efa", "tcpx")
INFINIBAND_S = 4e-6
# Words of a text that name a fabric -> its kind and start-up seconds in the catalogue.
FABRICS = (("efa", ("efa", 15e-6)), *((word, ("infiniband", INFINIBAND_S)) for word in ("infiniband", "connectx", "ndr")))
_RATE = re.compile(r"(?:(\d+)\s*x\s*)?(\d+(?:\.\d+)?)\s*(gb/s|gbps|gbit/s|gbytes/s|tb/s)", re.IGNORECASE)


class Machines:
    """Clusters by the text of their row; one object a run."""

    def __init__(self) -> None:
        self._known: dict[tuple[Any, ...], Cluster] = {}

    def cluster(self, row: Mapping[str, Any], devices: int) -> Cluster:
        """`devices` devices of the row's kind on its hosts; the last host may be partly used. Raises InputError for a device nobody knows."""
        per_node = max(1, min(row.get("gpus_per_node") or 8, devices))
        key = (row["gpu"], per_node, devices, row.get("inter_bw"))
        if key not in self._known:
            nodes, rest = divmod(devices, per_node)
            cluster = _parse(row["gpu"], per_node, max(1, nodes))
            pool = _network(_power(_memory(cluster.pool, row["gpu"]), row["gpu"]), row.get("inter_bw") or "", row.get("gpus_per_node") or 8)
            spare = (replace(pool, num_nodes=1, devices_per_node=rest),) if rest else ()
            self._known[key] = replace(cluster, pools=(pool, *spare))
        return self._known[key]


def _parse(gpu: str, per_node: int, nodes: int) -> Cluster:
    """The cluster of the longest leading part of the device's name that the catalogue knows: H100-96GB-HBM2e is an H100 with its memory given."""
    words = gpu.split("-")
    for end in range(len(words), 0, -1):
        try:
            return Cluster.parse(f"{per_node}x{'-'.join(words[:end])}*{nodes}")
        except InputError:
            if end == 1:
                raise
    raise InputError(f"{gpu!r} names no device", where="cluster.gpu", remedy="give a device name")


def _memory(pool: NodePool, gpu: str) -> NodePool:
    """The pool with the memory that the device's name states, where the catalogue's device has another size (beyond what the driver withholds)."""
    found = re.search(r"(\d+)\s*G(?:i)?B\b", gpu)
    if not found or abs(float(found[1]) * 2**30 / pool.device.memory_bytes - 1) < 0.1:
        return pool
    device = replace(pool.device, memory_bytes=float(found[1]) * 2**30)
    for kind, (size, rate) in MEMORY_STACKS.items():
        if kind in gpu.lower():
            device = replace(device, memory_bandwidth_bytes_per_s=float(found[1]) / size * rate)
    return replace(pool, device=device)


def _power(pool: NodePool, gpu: str) -> NodePool:
    """The pool with the power limit that the device's name states ("...-500W")."""
    found = re.search(r"\b(\d+)W\b", gpu)
    design = find_device(pool.device.device_id).design_watts if found else 0.0
    if not found or not design:
        return pool
    return replace(pool, device=replace(pool.device, power_frac=min(1.0, float(found[1]) / design)))


def _network(pool: NodePool, text: str, per_node: int) -> NodePool:
    """The pool with the network rate that `text` states ("400 Gb/s per GPU", "1600 Gbps node-node", "4x Omni-Path per node"), else at its usual rate."""
    found, low = _RATE.search(text), text.lower()
    if found:
        unit = found[3].lower()
        scale = 8.0 if found[3] in ("GB/s", "GBytes/s") else 1000.0 if unit.startswith("tb") else 1.0
        cards = found[1] or (re.search(r"(\d+)\s*x\s", text) or ("", "1"))[1]
        rate = float(cards) * float(found[2]) * scale
    else:
        named = next(((name, speed) for name, speed in LINK_GENERATIONS.items() if name in low), None)
        if named is None:  # A silent row ran on the fabric of the makers' reference clusters, unless its host is of a named cloud.
            silent = pool.network.kind in CLOUD_FABRICS and pool.network.kind not in low
            return replace(pool, network=replace(pool.network, kind="infiniband", latency_s=INFINIBAND_S)) if silent else pool
        count = re.search(r"(\d+)\s*x\s", low)
        rate = named[1] * float(count[1] if count else 1)
    shared = per_node if "node" in low and "per gpu" not in low else 1
    kind, latency_s = next((fabric for word, fabric in FABRICS if word in low), (pool.network.kind, pool.network.latency_s))
    link = replace(pool.network, bandwidth_bytes_per_s=rate * GIGABIT_PER_S / shared, kind=kind, latency_s=latency_s)
    return replace(pool, network=link)
