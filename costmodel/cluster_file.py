"""Cluster files: YAML or JSON, described in docs/clusters.md and docs/clusters.schema.json.

A file holds one pool, or `pools`, a list of them. A pool starts from a catalogue `gpu` or `instance` (or from a device described in place) and every other key
overrides what that start implies. Quantities carry their unit ("400 Gb/s"): a bare number would be a guess.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from costmodel.catalog import Catalog, DeviceRow, load_catalog
from costmodel.cluster_codec import check_keys, number
from costmodel.clusters import MAX_DEVICES, check_size, device_pool, instance_pool, known_device
from costmodel.errors import InputError, shown
from costmodel.hardware import Cluster, Device, Link, NodePool
from costmodel.units import parse_bytes, parse_bytes_per_s, parse_flops_per_s, parse_seconds
from costmodel.work import DTYPE_BYTES

POOL_KEYS = [
    "gpu", "instance", "nodes", "devices_per_node", "fast_domain", "fast_link", "network", "host_link", "host_memory", "storage", "usd_per_hour",
]  # fmt: skip
DEVICE_KEYS = ["name", "base", "arch", "memory", "memory_bandwidth", "peak"]
LINK_KEYS = ["kind", "bandwidth", "latency"]
STORAGE_KEYS = ["capacity", "read", "write"]
DOCS = "docs/clusters.md describes the keys"


def read_cluster_file(path: Path) -> Cluster:
    """The cluster that the file describes. Raises InputError naming the file and the key."""
    data = _load(path)
    where = str(path)
    if isinstance(data, Mapping) and "pools" in data:
        table = check_keys(data, ["name", "pools"], ["pools"], where)
        pools = table["pools"]
        if not isinstance(pools, list) or not pools:
            raise InputError(f"{shown(pools)} is not a list of pools", where=f"{where}: pools", remedy="give a list of mappings")
        places = [f"{where}: pools[{index}]" for index in range(len(pools))]
    else:
        table = check_keys(data, ["name", *POOL_KEYS], ["nodes"], where)
        pools, places = [{key: value for key, value in table.items() if key != "name"}], [where]
    name = table.get("name", path.stem)
    if not isinstance(name, str) or not name:
        raise InputError(f"{shown(name)} is not a name", where=f"{where}: name", remedy="give text")
    catalog = load_catalog()
    parsed = [_pool(pool, catalog, place) for pool, place in zip(pools, places, strict=True)]
    notes = dict.fromkeys(note for _, pool_notes in parsed for note in pool_notes)
    cluster = Cluster(name=name, pools=tuple(pool for pool, _ in parsed), notes=tuple(notes))
    check_size(cluster.num_devices, where)
    return cluster


def _load(path: Path) -> object:
    where = str(path)
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise InputError("no such file", where=where, remedy="check the path; names such as 8xH100*4 need no file") from None
    except IsADirectoryError:
        raise InputError("this is a directory", where=where, remedy="name a .yaml or .json file in it") from None
    except UnicodeDecodeError as error:
        raise InputError(f"not UTF-8 at byte {error.start}", where=where, remedy="save the file as UTF-8") from None
    except ValueError as error:
        raise InputError(f"not a path: {error}", where=ascii(where), remedy="name a .yaml or .json file") from None
    except OSError as error:
        raise InputError(error.strerror or str(error), where=where, remedy="check its permissions") from None
    try:
        return json.loads(text) if path.suffix.lower() == ".json" else yaml.safe_load(text)
    except (ValueError, yaml.YAMLError, RecursionError) as error:
        reason = " ".join(str(error).split())[:200]
        raise InputError(
            f"not readable as {'JSON' if path.suffix.lower() == '.json' else 'YAML'}: {reason}", where=where, remedy=DOCS
        ) from None


def _pool(data: object, catalog: Catalog, where: str) -> tuple[NodePool, tuple[str, ...]]:
    table = check_keys(data, POOL_KEYS, ["nodes"], where)
    nodes = _count(table["nodes"], "nodes", f"{where}: nodes")
    pool, notes = _start(table, catalog, nodes, where)
    changes: dict[str, Any] = {}
    for key in ("fast_link", "network", "host_link"):
        if key in table:
            changes[key] = _link(table[key], getattr(pool, key), catalog, f"{where}: {key}")
    if "fast_domain" in table:
        domain = _count(table["fast_domain"], "devices", f"{where}: fast_domain")
        if domain > pool.num_devices:
            remedy = f"give at most {pool.num_devices}, the devices of the pool"
            raise InputError(f"a fast domain of {domain} devices", where=f"{where}: fast_domain", remedy=remedy)
        changes["fast_domain"] = domain
    if "host_memory" in table:
        changes["host_memory_bytes"] = _positive(parse_bytes, table["host_memory"], f"{where}: host_memory")
    if "storage" in table:
        changes |= _storage(table["storage"], f"{where}: storage")
    if "usd_per_hour" in table:
        changes["usd_per_hour"] = number(table["usd_per_hour"], f"{where}: usd_per_hour")
    return replace(pool, **changes), notes


def _start(table: Mapping[str, Any], catalog: Catalog, nodes: int, where: str) -> tuple[NodePool, tuple[str, ...]]:
    """The pool before overrides, and what it assumes."""
    if ("gpu" in table) == ("instance" in table):
        found = "both gpu and instance" if "gpu" in table else "neither gpu nor instance"
        raise InputError(found, where=where, remedy="give one of them; the other keys override what it implies")
    if "instance" in table:
        name = _text(table["instance"], f"{where}: instance")
        instance = catalog.instance(name)
        if instance is None:
            known_device(catalog, name, where=f"{where}: instance")
            raise InputError(f"{name!r} is a device, not an instance", where=f"{where}: instance", remedy=f"write gpu: {name}")
        if "devices_per_node" in table:
            text = f"instance {instance.instance_id} has {instance.pool.devices_per_node} devices already"
            raise InputError(text, where=f"{where}: devices_per_node", remedy="leave the key out, or start from gpu")
        return instance_pool(instance, nodes)
    row = _device(table["gpu"], catalog, f"{where}: gpu")
    per_node = _count(table.get("devices_per_node", row.usual_devices_per_node), "devices", f"{where}: devices_per_node")
    check_size(nodes * per_node, where)
    pool, notes = device_pool(row, catalog, num_nodes=nodes, devices_per_node=per_node)
    caveat = (f"{row.name}: {row.caveat}",) if row.caveat else ()
    described = all(key in table for key in ("network", "host_memory", "storage", "usd_per_hour"))
    return pool, caveat if described else (*caveat, *notes)


def _device(value: object, catalog: Catalog, where: str) -> DeviceRow:
    """A catalogue row: the one named, or one described in place, over `base` where that is given."""
    if isinstance(value, str):
        instance = catalog.instance(value)
        if instance is not None:
            raise InputError(f"{value!r} is an instance, not a device", where=where, remedy=f"write instance: {instance.instance_id}")
        return known_device(catalog, value, where=where)
    table = check_keys(value, DEVICE_KEYS, ["name"], where)
    name, based = _text(table["name"], f"{where}.name"), "base" in table
    row = known_device(catalog, _text(table["base"], f"{where}.base") if based else "L40S", where=f"{where}.base")
    missing = [key for key in ("memory", "memory_bandwidth", "peak") if key not in table]
    if missing and not based:
        raise InputError(f"missing {', '.join(missing)}", where=where, remedy="add them, or name a catalogue device as base")
    old, place = row.device, f"{where}."
    bandwidth = table.get("memory_bandwidth")
    device = Device(
        device_id=name,
        arch=_text(table.get("arch", old.arch if based else "unknown"), f"{where}.arch"),
        memory_bytes=_positive(parse_bytes, table["memory"], place + "memory") if "memory" in table else old.memory_bytes,
        memory_bandwidth_bytes_per_s=(
            old.memory_bandwidth_bytes_per_s if bandwidth is None else _positive(parse_bytes_per_s, bandwidth, place + "memory_bandwidth")
        ),
        peak_flops=_peaks(table["peak"], place + "peak") if "peak" in table else old.peak_flops,
        source="cluster file" + (f", over {old.device_id}" if based else ""),
    )
    return replace(row, device=device, aliases=(name,), caveat=row.caveat if based else "", fast_domain=row.fast_domain if based else 0)


def _peaks(value: object, where: str) -> tuple[tuple[str, float], ...]:
    table = check_keys(value, list(DTYPE_BYTES), [], where)
    if not table:
        raise InputError("no rate", where=where, remedy="write for example {bf16: 312 TFLOP/s, fp32: 19.5 TFLOP/s}")
    return tuple((dtype, _positive(parse_flops_per_s, rate, f"{where}.{dtype}")) for dtype, rate in table.items())


def _link(value: object, implied: Link, catalog: Catalog, where: str) -> Link:
    """`implied` with the given keys changed; a new kind without latency takes the latency of that kind."""
    table = check_keys(value, LINK_KEYS, [], where)
    kind = _text(table.get("kind", implied.kind), f"{where}.kind")
    known = [name for name in catalog.defaults["latency_us"] if name != "host"]
    if kind not in (*known, implied.kind) and "latency" not in table:
        raise InputError(
            f"no latency is known for kind {kind!r}", where=where, remedy=f"add latency: 5us, or use one of {', '.join(known)}"
        )
    bandwidth, latency = implied.bandwidth_bytes_per_s, implied.latency_s
    if "bandwidth" in table:
        bandwidth = _positive(parse_bytes_per_s, table["bandwidth"], f"{where}.bandwidth")
    if "latency" in table:
        latency = parse_seconds(table["latency"], where=f"{where}.latency")
    elif kind != implied.kind:
        return catalog.link(kind, bandwidth)
    return Link(kind=kind, bandwidth_bytes_per_s=bandwidth, latency_s=latency)


def _storage(value: object, where: str) -> dict[str, float]:
    table = check_keys(value, STORAGE_KEYS, STORAGE_KEYS, where)
    return {
        "storage_bytes": parse_bytes(table["capacity"], where=f"{where}.capacity"),
        "storage_read_bytes_per_s": _positive(parse_bytes_per_s, table["read"], f"{where}.read"),
        "storage_write_bytes_per_s": _positive(parse_bytes_per_s, table["write"], f"{where}.write"),
    }


def _positive(parse: Callable[..., float], value: object, where: str) -> float:
    amount = parse(value, where=where)
    if amount <= 0:
        raise InputError(f"{shown(value)} is zero", where=where, remedy="give more than zero")
    return amount


def _count(value: object, what: str, where: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MAX_DEVICES:
        raise InputError(f"{shown(value)} is not a number of {what}", where=where, remedy=f"give a whole number from 1 to {MAX_DEVICES}")
    return value


def _text(value: object, where: str) -> str:
    if not isinstance(value, str) or not value:
        raise InputError(f"{shown(value)} is not text", where=where, remedy="give text")
    return value
