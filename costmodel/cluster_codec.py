"""Clusters as plain data and back, exactly: what plan files hold. Every float survives, because JSON writes the shortest text that reads back equal."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any

from costmodel.errors import InputError, shown
from costmodel.hardware import Cluster, Device, Link, NodePool

Json = dict[str, Any]


def cluster_to_dict(cluster: Cluster) -> Json:
    """`cluster` as dicts, lists, strings and numbers, in the units of its fields."""
    return {
        "name": cluster.name,
        "pools": [
            {**asdict(pool), "device": {**asdict(pool.device), "peak_flops": dict(pool.device.peak_flops)}} for pool in cluster.pools
        ],
        "notes": list(cluster.notes),
    }


def cluster_from_dict(data: object, *, where: str = "cluster") -> Cluster:
    """The inverse of `cluster_to_dict`. Raises InputError with the place of the first unknown, missing or ill-typed key."""
    table = _table(data, Cluster, where)
    pools = _list(table["pools"], f"{where}.pools")
    if not pools:
        raise InputError("no pool", where=f"{where}.pools", remedy="give at least one")
    return Cluster(
        name=_text(table["name"], f"{where}.name"),
        pools=tuple(_pool(pool, f"{where}.pools[{index}]") for index, pool in enumerate(pools)),
        notes=tuple(_text(note, f"{where}.notes") for note in _list(table.get("notes", []), f"{where}.notes")),
    )


def _pool(data: object, where: str) -> NodePool:
    table = _table(data, NodePool, where)
    values: Json = {}
    for name, value in table.items():
        place = f"{where}.{name}"
        if name == "device":
            values[name] = _device(value, place)
        elif name in ("fast_link", "network", "host_link"):
            values[name] = _link(value, place)
        elif name in ("num_nodes", "devices_per_node", "fast_domain"):
            values[name] = _count(value, place)
        elif name == "instance":
            values[name] = _text(value, place)
        else:
            values[name] = None if value is None and name == "usd_per_hour" else number(value, place)
    return NodePool(**values)


def _device(data: object, where: str) -> Device:
    table = _table(data, Device, where)
    peaks = table["peak_flops"]
    if not isinstance(peaks, Mapping):
        raise InputError(
            f"{shown(peaks)} is not a mapping from dtype to flops per second", where=f"{where}.peak_flops", remedy="write {bf16: 3.12e14}"
        )
    values: Json = {name: _text(table[name], f"{where}.{name}") for name in ("device_id", "arch", "kind", "source") if name in table}
    for name in ("memory_bytes", "memory_bandwidth_bytes_per_s"):
        values[name] = number(table[name], f"{where}.{name}")
    if "power_frac" in table:
        values["power_frac"] = number(table["power_frac"], f"{where}.power_frac")
    return Device(peak_flops=tuple((str(dtype), number(rate, f"{where}.peak_flops.{dtype}")) for dtype, rate in peaks.items()), **values)


def _link(data: object, where: str) -> Link:
    table = _table(data, Link, where)
    return Link(
        kind=_text(table["kind"], f"{where}.kind"),
        bandwidth_bytes_per_s=number(table["bandwidth_bytes_per_s"], f"{where}.bandwidth_bytes_per_s"),
        latency_s=number(table["latency_s"], f"{where}.latency_s"),
    )


def _table(data: object, kind: type, where: str) -> Mapping[str, Any]:
    known = [field.name for field in fields(kind)]
    required = [field.name for field in fields(kind) if field.default is field.default_factory]
    return check_keys(data, known, required, where)


def check_keys(data: object, known: list[str], required: list[str], where: str) -> Mapping[str, Any]:
    """`data` as a mapping that has every required key and none but the known ones. Raises InputError, with the nearest known key."""
    if not isinstance(data, Mapping):
        raise InputError(f"{shown(data)} is not a mapping", where=where, remedy=f"give the keys {', '.join(required or known)}")
    for key in data:
        if key not in known:
            close = difflib.get_close_matches(str(key), known, n=1)
            hint = f"did you mean {close[0]!r}? " if close else ""
            raise InputError(f"unknown key {shown(key)}", where=where, remedy=f"{hint}known keys: {', '.join(known)}")
    missing = [key for key in required if key not in data]
    if missing:
        raise InputError(f"missing {', '.join(missing)}", where=where, remedy=f"add {'it' if len(missing) == 1 else 'them'}")
    return data


def number(value: object, where: str) -> float:
    """A finite number that is not negative. Raises InputError."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= sys.float_info.max:
        raise InputError(f"{shown(value)} is not a number of at least 0", where=where, remedy="give a finite number")
    return float(value)


def _count(value: object, where: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise InputError(f"{shown(value)} is not a whole number of at least 1", where=where, remedy="give a whole number")
    return value


def _list(value: object, where: str) -> list[Any]:
    if not isinstance(value, (list, tuple)):
        raise InputError(f"{shown(value)} is not a list", where=where, remedy="give a list")
    return list(value)


def _text(value: object, where: str) -> str:
    if not isinstance(value, str):
        raise InputError(f"{shown(value)} is not text", where=where, remedy="give text")
    return value
