"""The machine this runs on as a pool: its CUDA GPUs as nvidia-smi lists them, else CPU ranks that talk over loopback. Nothing is cached.

CPU ranks are priced by two short measurements on this machine (`measure_core`): flops per second of one core from a matmul, bytes per second from a copy.
A rank gets min(1, cores / ranks) of both, memory / ranks of the memory. Links between ranks come from gloo all-reduces measured once on another
machine (defaults.yaml, `loopback`); all this is in the notes.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from pathlib import Path

import numpy as np

from costmodel.catalog import Catalog
from costmodel.errors import InputError
from costmodel.hardware import Device, Link, NodePool
from costmodel.units import GB, MIB, MILLION, format_bytes, format_bytes_per_s, format_flops_per_s

Probed = tuple[str, NodePool, tuple[str, ...]]
_QUERY = "name,memory.total,pcie.link.gen.max,pcie.link.width.max"


def probe_pool(catalog: Catalog, *, kind: str = "", num_devices: int | None = None) -> Probed:
    """Name, pool and notes of this machine. kind: "gpu", "cpu", or "" for GPUs when there are any. num_devices: None takes all GPUs, or one rank per core.

    Raises InputError when more GPUs are wanted than there are, or a GPU is not in the catalogue.
    """
    rows = () if kind == "cpu" else nvidia_smi()
    if rows:
        return gpu_pool(catalog, rows, num_devices, host_memory_bytes())
    if kind == "gpu":
        raise InputError("nvidia-smi lists no GPU on this machine", where="cluster 'local-gpu'", remedy="use local-cpu, or name a cluster")
    cores = num_cores()
    flops_per_s, bytes_per_s = measure_core()
    return cpu_pool(
        catalog,
        num_devices or max(1, int(cores)),
        cores=cores,
        host_bytes=host_memory_bytes(),
        flops_per_s=flops_per_s,
        bytes_per_s=bytes_per_s,
        native_bf16="bf16" in _read("/proc/cpuinfo"),
    )


def nvidia_smi() -> tuple[tuple[str, ...], ...]:
    """One row (name, MiB, PCIe generation, PCIe lanes) a GPU; () without nvidia-smi or without a driver that answers."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return ()
    command = [tool, f"--query-gpu={_QUERY}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return ()
    return tuple(tuple(cell.strip() for cell in line.split(",")) for line in done.stdout.splitlines() if line.count(",") == 3)


def gpu_pool(catalog: Catalog, rows: tuple[tuple[str, ...], ...], num_devices: int | None, host_bytes: float) -> Probed:
    """The pool of the GPUs in `rows` (see `nvidia_smi`): memory and PCIe width as they say, peaks and NVLink from the catalogue."""
    count, where = num_devices or len(rows), "cluster 'local'"
    if count > len(rows):
        remedy = f"use local:{len(rows)}, or local-cpu:{count} for CPU ranks"
        raise InputError(f"{count} devices wanted, nvidia-smi lists {len(rows)} GPUs", where=where, remedy=remedy)
    names = {row[0] for row in rows[:count]}
    known = catalog.device(rows[0][0])
    if len(names) > 1 or known is None:
        text = f"several kinds of GPU ({', '.join(sorted(names))})" if len(names) > 1 else f"{rows[0][0]!r} is not in the catalogue"
        raise InputError(text, where=where, remedy="describe the machine in a cluster file (docs/clusters.md)")
    _, mebibytes, generation, lanes = rows[0]
    per_lane = catalog.defaults["pcie_gb_per_s_per_lane_per_direction"]["value"]
    host_link = known.host_link
    if host_link.kind == "pcie" and generation.isdigit() and lanes.isdigit() and int(generation) in per_lane:
        host_link = catalog.link("pcie", per_lane[int(generation)] * int(lanes) * GB, host_link.latency_s)
    device = known.device
    memory = int(mebibytes) * MIB if mebibytes.isdigit() else device.memory_bytes
    pool = NodePool(
        device=Device(
            device_id=device.device_id,
            arch=device.arch,
            memory_bytes=float(memory),
            memory_bandwidth_bytes_per_s=device.memory_bandwidth_bytes_per_s,
            peak_flops=device.peak_flops,
            source=f"memory: nvidia-smi; peaks: {device.source}",
        ),
        num_nodes=1,
        devices_per_node=count,
        fast_domain=count,
        fast_link=known.fast_link if not known.fast_link.kind.startswith("pcie") else _as_wide(known.fast_link, host_link, catalog),
        network=_ethernet(catalog, count),
        host_link=host_link,
        host_memory_bytes=host_bytes,
    )
    return f"local-gpu:{count}", pool, (f"local: {count} x {known.name} as nvidia-smi lists them; peaks and GPU links from the catalogue",)


def cpu_pool(
    catalog: Catalog, ranks: int, *, cores: float, host_bytes: float, flops_per_s: float, bytes_per_s: float, native_bf16: bool = False
) -> Probed:
    """`ranks` CPU ranks on `cores` cores of `flops_per_s` and `bytes_per_s` each, sharing `host_bytes`.

    Loopback: latency and bandwidth of defaults.yaml, times (ranks/cores)**latency_exponent and over (ranks/cores)**bandwidth_exponent beyond one rank a core.
    """
    crowding = max(1.0, ranks / cores)
    fp32, copy = flops_per_s / crowding, bytes_per_s / crowding
    loopback, rates = catalog.defaults["loopback"], catalog.defaults["cpu_rate_over_fp32"]
    fracs = {"fp64": rates["fp64"], "fp32": 1.0, "bf16": rates["bf16_native" if native_bf16 else "bf16_emulated"], "fp16": rates["fp16"]}
    latency = loopback["latency_us"] / MILLION * crowding ** loopback["latency_exponent"]
    between = loopback["gb_per_s_per_direction"] * GB / crowding ** loopback["bandwidth_exponent"]
    device = Device(
        device_id="local-cpu-rank",
        arch="cpu",
        memory_bytes=float(host_bytes // ranks),
        memory_bandwidth_bytes_per_s=copy,
        peak_flops=tuple((dtype, fp32 * frac) for dtype, frac in fracs.items()),
        kind="cpu",
        source="measured here: numpy fp32 matmul per core-second and numpy copy; other dtypes by cpu_rate_over_fp32 of defaults.yaml",
    )
    pool = NodePool(
        device=device,
        num_nodes=1,
        devices_per_node=ranks,
        fast_domain=ranks,
        fast_link=Link(kind="loopback", bandwidth_bytes_per_s=between, latency_s=latency),
        network=_ethernet(catalog, ranks),
        host_link=Link(kind="memory", bandwidth_bytes_per_s=copy, latency_s=1 / MILLION),
        host_memory_bytes=host_bytes,
    )
    notes = (
        f"local: {ranks} CPU ranks on {cores:g} cores, {format_bytes(device.memory_bytes)} each; measured {format_flops_per_s(fp32)} and "
        f"{format_bytes_per_s(copy)} a rank; loopback {format_bytes_per_s(between)} a rank from gloo measured on another machine",
    )
    return f"local-cpu:{ranks}", pool, notes


def measure_core() -> tuple[float, float]:
    """(fp32 flops per second of one core, bytes per second read plus written by a copy), in about a quarter of a second.

    Flops: 2 n**3 over CPU seconds of the process, so that neither other load nor the number of BLAS threads counts; a batch lasts long enough that
    the scheduler's tick (4 ms, after which it books the time of other threads) does not matter. Bytes: 2 x 32 MiB over the fastest copy.
    """
    size, batch = 512, 40
    left = np.full((size, size), 0.5, dtype=np.float32)
    np.matmul(left, left)
    start = time.process_time()
    for _ in range(batch):
        np.matmul(left, left)
    flops_per_s = batch * 2.0 * size**3 / max(time.process_time() - start, 1e-3)
    source, target = np.ones(32 * MIB, dtype=np.uint8), np.empty(32 * MIB, dtype=np.uint8)
    seconds = []
    for _ in range(5):
        begin = time.perf_counter()
        np.copyto(target, source)
        seconds.append(time.perf_counter() - begin)
    return flops_per_s, 2 * source.nbytes / min(seconds)


def num_cores() -> float:
    """Cores this process may use: its affinity, and the CPU quota of its control group."""
    cores = float(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    quota = _read("/sys/fs/cgroup/cpu.max").split()
    if len(quota) == 2 and quota[0].isdigit():
        cores = min(cores, int(quota[0]) / int(quota[1]))
    return cores


def host_memory_bytes() -> float:
    """Memory this process may use: that of the machine, and the limit of its control group."""
    total = float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    limit = _read("/sys/fs/cgroup/memory.max").strip()
    return min(total, float(limit)) if limit.isdigit() else total


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="ascii")
    except (OSError, UnicodeDecodeError):
        return ""


def _ethernet(catalog: Catalog, devices: int) -> Link:
    network = catalog.defaults["network"]
    return catalog.link(network["kind"], network["gbit_per_s_per_node"] * GB / 8 / devices)


def _as_wide(link: Link, host_link: Link, catalog: Catalog) -> Link:
    frac = catalog.defaults["staged_pcie_frac"]["value"] if link.kind == "pcie-staged" else 1.0
    return Link(kind=link.kind, bandwidth_bytes_per_s=host_link.bandwidth_bytes_per_s * frac, latency_s=link.latency_s)
