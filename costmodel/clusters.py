"""Cluster names to clusters: `8xH100*4`, `H100:8*4`, `p5.48xlarge*4`, `local:4`, a file, or several joined by `+`.

    pool     :=  COUNT "x" DEVICE ["*" NODES]  |  DEVICE [":" COUNT] ["*" NODES]  |  INSTANCE ["*" NODES]  |  "local" ["-cpu" | "-gpu"] [":" COUNT]
    cluster  :=  pool { ("+" | ",") pool }     |  path of a .yaml, .yml or .json file (costmodel.cluster_file)

COUNT is devices per node. More than a host of that device usually holds becomes several hosts, and the cluster's notes say so. A device alone says
nothing about its host: memory, disks, price and network are taken in proportion from the usual instance of that device (`host_like` of the catalogue).
"""

from __future__ import annotations

import difflib
import re
from dataclasses import replace
from pathlib import Path

from costmodel.catalog import Catalog, DeviceRow, InstanceRow, load_catalog, name_key
from costmodel.errors import InputError, shown
from costmodel.hardware import Cluster, NodePool
from costmodel.units import format_bytes_per_s

MAX_DEVICES = 1_000_000
FORMS = "write COUNTxDEVICE*NODES (8xH100*4), an instance (p5.48xlarge*2), local, or a .yaml file; `autoplan hardware` lists the names"
_POOL = re.compile(
    r"(?:(?P<before>[+-]?\d+)\s*[xX×]\s*)?(?P<name>[A-Za-z0-9][^*:]*?)\s*(?::\s*(?P<after>[^*:]*))?(?:\*\s*(?P<nodes>[^*:]*))?"
)
_LOCAL = re.compile(r"local(?:-(cpu|gpu))?\s*(?::(.*))?", re.IGNORECASE)


def parse_cluster(text: str | Path) -> Cluster:
    """The cluster that `text` names, its assumptions in `notes`. Raises InputError saying what is wrong, where, and what to write instead."""
    if isinstance(text, Path) or (isinstance(text, str) and _is_path(text)):
        from costmodel.cluster_file import read_cluster_file

        return read_cluster_file(Path(text))
    if not isinstance(text, str) or not text.strip():
        raise InputError(f"{shown(text)} names no cluster", where="cluster", remedy=FORMS)
    parts = [part.strip() for part in re.split(r"[+,]", text)]
    if not all(parts):
        raise InputError(
            f"{text!r} has an empty pool", where="cluster", remedy="join pools with one + between them: 8xA100-40GB*2+8xV100-32GB"
        )
    catalog = load_catalog()
    parsed = [parse_pool(part, catalog) for part in parts]
    cluster = Cluster(
        name="+".join(name for name, _, _ in parsed),
        pools=tuple(pool for _, pool, _ in parsed),
        notes=tuple(dict.fromkeys(note for _, _, notes in parsed for note in notes)),
    )
    check_size(cluster.num_devices, f"cluster {text!r}")
    return cluster


def list_devices() -> tuple[DeviceRow, ...]:
    """Every device of the catalogue."""
    return load_catalog().devices


def list_instances() -> tuple[InstanceRow, ...]:
    """Every host and cloud instance of the catalogue."""
    return load_catalog().instances


def find_device(name: str) -> DeviceRow:
    """The device called `name` (id or alias, any case). Raises InputError with the nearest names."""
    return known_device(load_catalog(), name, where=f"device {name!r}")


def known_device(catalog: Catalog, name: str, *, where: str) -> DeviceRow:
    """The row of `name` in `catalog`. Raises InputError with the nearest names."""
    row = catalog.device(name)
    if row is None:
        raise InputError(f"no device or instance is called {name!r}", where=where, remedy=f"{_nearest(catalog, name)}{FORMS}")
    return row


def parse_pool(text: str, catalog: Catalog) -> tuple[str, NodePool, tuple[str, ...]]:
    """Canonical name, pool and notes of one pool's text."""
    where = f"cluster {text!r}"
    local = _LOCAL.fullmatch(text)
    if local:
        from costmodel.probe import probe_pool

        count = None if local[2] is None else whole_number(local[2], "devices", where)
        return probe_pool(catalog, kind=(local[1] or "").lower(), num_devices=count)
    match = _POOL.fullmatch(text)
    if match is None:
        raise InputError("this is not a cluster", where=where, remedy=FORMS)
    if match["before"] is not None and match["after"] is not None:
        raise InputError("the number of devices is given twice", where=where, remedy=f"write {match['before']}x{match['name']} alone")
    given = match["before"] if match["before"] is not None else match["after"]
    count = None if given is None else whole_number(given, "devices", where)
    nodes = None if match["nodes"] is None else whole_number(match["nodes"], "nodes", where)
    instance = catalog.instance(match["name"])
    if instance is None:
        return _device_pool(known_device(catalog, match["name"], where=where), match["name"], count, nodes, catalog, where)
    if count is not None:
        remedy = f"its number of nodes goes behind: {instance.instance_id}*{count}"
        raise InputError(
            f"instance {instance.instance_id} has {instance.pool.devices_per_node} devices already", where=where, remedy=remedy
        )
    pool, notes = instance_pool(instance, nodes or 1)
    return f"{instance.instance_id}*{nodes}" if nodes else instance.instance_id, pool, notes


def instance_pool(instance: InstanceRow, num_nodes: int) -> tuple[NodePool, tuple[str, ...]]:
    """`num_nodes` of an instance, with what had to be assumed."""
    pool = replace(instance.pool, num_nodes=num_nodes, fast_domain=min(instance.fast_domain, num_nodes * instance.pool.devices_per_node))
    notes = []
    if instance.network_assumed and num_nodes > 1:
        notes.append(
            f"{instance.instance_id} lists no network between nodes: {format_bytes_per_s(pool.network.bandwidth_bytes_per_s)} per device assumed"
        )
    if instance.confidence == "C":
        notes.append(f"{instance.instance_id}: figures recalled or typical, not read from its provider")
    return pool, tuple(notes)


def device_pool(row: DeviceRow, catalog: Catalog, *, num_nodes: int, devices_per_node: int) -> tuple[NodePool, tuple[str, ...]]:
    """Hosts for a device that was named alone: the share of its usual instance that `devices_per_node` devices make, and the note that says so."""
    host = catalog.instance(row.host_like)
    assert host is not None, row.host_like
    share = devices_per_node / host.pool.devices_per_node
    own = host.pool.device.device_id == row.device.device_id
    price = host.pool.usd_per_hour if own else None
    pool = replace(
        host.pool,
        device=row.device,
        num_nodes=num_nodes,
        devices_per_node=devices_per_node,
        fast_domain=min(row.fast_domain or devices_per_node, num_nodes * devices_per_node),
        fast_link=row.fast_link,
        host_link=row.host_link,
        host_memory_bytes=host.pool.host_memory_bytes * share,
        storage_bytes=host.pool.storage_bytes * share,
        usd_per_hour=None if price is None else price * share,
        instance="",
    )
    return pool, (_host_note(row, host, pool, own),)


def whole_number(text: str, what: str, where: str) -> int:
    """A positive number of devices or nodes. Raises InputError."""
    if not re.fullmatch(r"\d{1,9}", text.strip()) or int(text) < 1:
        raise InputError(f"{text.strip()!r} is not a number of {what}", where=where, remedy="give a whole number, at least 1")
    return int(text)


def check_size(num_devices: int, where: str) -> None:
    """Raises InputError above MAX_DEVICES, where a typing error is likelier than a cluster."""
    if num_devices > MAX_DEVICES:
        raise InputError(f"{num_devices} devices are more than {MAX_DEVICES}", where=where, remedy="check the number of nodes")


def _device_pool(
    row: DeviceRow, spelled: str, count: int | None, nodes: int | None, catalog: Catalog, where: str
) -> tuple[str, NodePool, tuple[str, ...]]:
    usual, per_node, num_nodes = row.usual_devices_per_node, count or 1, nodes or 1
    spelled = next((alias for alias in row.aliases if name_key(alias) == name_key(spelled)), row.name)
    notes = []
    if per_node > usual:
        if per_node % usual:
            remedy = f"write {usual}x{spelled}*{per_node // usual + 1}, or two pools: {usual}x{spelled}*{per_node // usual}+{per_node % usual}x{spelled}"
            raise InputError(f"{per_node} devices do not fill hosts of {usual}", where=where, remedy=remedy)
        num_nodes, per_node = num_nodes * (per_node // usual), usual
        notes.append(f"a host holds {usual} {spelled}: taken as {num_nodes} nodes of {usual}")
    others = catalog.others(spelled)
    if others:
        notes.append(f"{spelled} taken as {row.device.device_id}; for another write {' or '.join(others)}")
    if row.caveat:
        notes.append(f"{spelled}: {row.caveat}")
    pool, host_notes = device_pool(row, catalog, num_nodes=num_nodes, devices_per_node=per_node)
    name = f"{per_node}x{spelled}" + (f"*{num_nodes}" if num_nodes > 1 else "")
    return name, pool, (*notes, *host_notes)


def _host_note(row: DeviceRow, host: InstanceRow, pool: NodePool, own: bool) -> str:
    rate = format_bytes_per_s(pool.network.bandwidth_bytes_per_s)
    which = (
        f"its usual instance {host.instance_id}"
        if own
        else f"{host.instance_id} (no instance of {row.name} is in the catalogue, so no price)"
    )
    network = f", {rate} {pool.network.kind} per device between nodes" if pool.num_nodes > 1 else ""
    return f"{row.name}: host memory, disks{' and price' if own and pool.usd_per_hour else ''} in proportion from {which}{network}"


def _nearest(catalog: Catalog, name: str) -> str:
    names = {name_key(alias): alias for row in catalog.devices for alias in row.aliases}
    names |= {name_key(row.instance_id): row.instance_id for row in catalog.instances}
    close = difflib.get_close_matches(name_key(name), names, n=3, cutoff=0.6)
    return f"did you mean {' or '.join(names[key] for key in close)}? " if close else ""


def _is_path(text: str) -> bool:
    return text.strip().lower().endswith((".yaml", ".yml", ".json")) or "/" in text or "\\" in text
