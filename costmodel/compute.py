"""Seconds of one `Compute` on one device: roofline with an efficiency per kind of kernel.

    t = num_kernels x start + max(flops / (peak x eff), bytes / (bandwidth x frac))

`start` is the device-side floor of one kernel (measured: the shortest kernels of the tables), host dispatch is priced in costmodel.simulate.

GEMM: the output is cut in tiles of tm x tn; C cores run one tile each, so tiles run in waves, and every tile pays a prologue and epilogue worth k0 steps of
its k loop; k may be split over idle cores, whose partial sums then pass through the L2. Arithmetic and memory overlap, all but (norm of order p); a long
kernel loses clock to the power limit:

    loop   = min over tiles (tm, tn) and splits s of  waves(x) 2 tm tn (k/s + k0) / (peak / C x e(tm, tn))  + [s > 1] (split + 8 s m n / L2)
             x = ceil(m/tm) ceil(n/tn) batch s / C,   waves(x) = max(1, (1 - drift) ceil(x) + drift x)
    memory = bytes (miss / (bandwidth x frac) + (1 - miss) / L2),   miss = 1 / (1 + (capacity x l2_frac / bytes)^4)
    busy   = (loop^p + memory^p)^(1/p),   t = start + busy (1 + derate x busy / (busy + 1 ms))

L2 is C x l2_per_core. Twelve constants per device and dtype, fitted by tests/bench/fit_kernels.py; values and residuals in costmodel/profiles/gemm.py.

Inside a step matmuls run at `sustained` of that speed and have lost all of that clock (busy (1 + derate)) whatever the length of one kernel: the tables hold
short bursts, a training step runs at the power limit.

Attention: t = start + flops / (peak x frac x fill x length). fill = T / (T + h C) for T = batch x heads x ceil(n_q / 128) blocks of queries on C cores
(backward also splits over keys: a smaller h); heads wider than 128 lose 5 % forward and 20 % backward;
length = n / (n + n_half): short sequences spend their time at the causal diagonal and in the prologue. Everything else: bytes over achieved
bandwidth. CPU ranks use the same formulas with one core and no waves.
"""

from __future__ import annotations

from math import ceil

from costmodel.errors import InputError
from costmodel.hardware import Device
from costmodel.profiles.gemm import GemmConstants
from costmodel.profiles.kernels import KernelProfile, kernel_profile
from costmodel.work import DTYPE_BYTES, Compute

TILES = ((256, 128), (128, 256), (128, 128), (128, 64), (64, 128), (64, 64))
TILE_CLASSES = ("", "", "square", "half", "half", "small")
SPLITS = (1, 2, 3, 4, 6, 8, 12, 16)
# A split leaves at least this much of k, and at most this many tiles per core.
SPLIT_K, SPLIT_WAVES = 128, 2.0
DERATE_HALF_S = 1e-3
# Sequence length at half speed, and attention with heads wider than 128 (latent attention: 192 for queries and keys): fitted to FlashAttention and cuDNN
# timings on A100 and B200 at 4k-131k tokens and 4-128 heads (SimuMax system configs, Apache-2.0); grouped queries make no difference there.
HALF_LENGTH = 400
WIDE_HEAD, WIDE_FORWARD_FRAC, WIDE_BACKWARD_FRAC = 128, 0.95, 0.8
# Block-scaled forms run on the units of their element.
SCALED = {"fp8_block": "fp8"}
# Matmul clocks under a power limit: power goes with clock x voltage^2 and voltage follows the clock in that range, less what does not depend on it.
POWER_EXPONENT = 0.5
_MATMUL_CLASSES = frozenset({"gemm", "grouped_gemm", "conv"})


def compute_s(work: Compute, device: Device, profile: KernelProfile | None = None) -> float:
    """Seconds `work` takes on `device`. Raises InputError when the device has no unit for its dtype."""
    profile = profile or kernel_profile(device)
    nbytes = work.read_bytes + work.write_bytes
    if work.op_class in _MATMUL_CLASSES and work.flops > 0.0:
        return _matmul_s(work, nbytes, device, profile)
    if work.op_class == "attention":
        return _attention_s(work, nbytes, device, profile)
    return work.num_kernels * profile.start_s + nbytes / (device.memory_bandwidth_bytes_per_s * profile.bandwidth(work.op_class))


def least_s(work: Compute, device: Device, profile: KernelProfile) -> float:
    """What `compute_s` never falls below however `work` is divided over devices: matmuls and attention at the speed of endless ones, else the bytes.

    It is linear in flops and bytes, so the parts of a divided kernel take as long together.
    """
    if work.op_class in _MATMUL_CLASSES and work.flops > 0.0:
        constants = profile.gemm(work.dtype)
        speed = constants.efficiency_frac * profile.sustained_frac * clock_frac(device)
        speed *= max(1.0, *(constants.tile_frac(name) for name in TILE_CLASSES)) * max(
            1.0, constants.layout_frac(work.layout, work.accumulate)
        )
        if work.op_class == "grouped_gemm":
            speed *= max(1.0, constants.grouped_frac) * max(1.0, constants.grouped_accumulate_frac)
        return work.flops / (peak_flops(device, work.dtype) * speed)
    if work.op_class == "attention":
        frac = profile.attention_backward_frac if work.backward else profile.attention_forward_frac
        return work.flops / (peak_flops(device, work.dtype) * clock_frac(device) * frac)
    return (work.read_bytes + work.write_bytes) / (device.memory_bandwidth_bytes_per_s * profile.bandwidth(work.op_class))


def peak_flops(device: Device, dtype: str) -> float:
    """Dense peak of `dtype`. Raises InputError naming device, dtype and what the device has.

    CPUs compute every float dtype, at the fp32 rate when the device row does not say otherwise.
    """
    peak = device.peak(dtype)
    if peak <= 0.0 and dtype in SCALED:
        peak = device.peak(SCALED[dtype])
    if peak <= 0.0 and device.kind == "cpu":
        peak = device.peak("fp32")
    if peak <= 0.0:
        known = ", ".join(name for name, value in device.peak_flops if value > 0.0)
        raise InputError(
            f"{device.device_id} has no {dtype} units (it has {known})",
            where="Job.precision",
            remedy=f"use one of {known}, or another device",
        )
    return peak


def clock_frac(device: Device) -> float:
    """Matmul clock of `device` under its power limit over the clock at its design power."""
    return float(device.power_frac**POWER_EXPONENT)


def _matmul_s(work: Compute, nbytes: float, device: Device, profile: KernelProfile) -> float:
    peak = peak_flops(device, work.dtype)
    constants = profile.gemm(work.dtype)
    bandwidth = device.memory_bandwidth_bytes_per_s
    if not (work.m and work.n and work.k):
        busy = max(
            work.flops / (peak * constants.efficiency_frac * profile.sustained_frac * clock_frac(device)),
            nbytes / (bandwidth * constants.bandwidth_frac),
        )
        return work.num_kernels * constants.start_s + busy
    rows = max(1, ceil(work.m / work.batch)) if work.op_class == "grouped_gemm" else work.m
    cores = 1 if device.kind == "cpu" else profile.num_cores(device)
    factor = profile.sustained_frac * clock_frac(device)
    if work.op_class == "grouped_gemm":
        factor *= constants.grouped_frac * (constants.grouped_accumulate_frac if work.accumulate else 1.0)
    layout = constants.layout_frac(work.layout, work.accumulate)
    # `num_kernels` equal matrices in sequence (flops and bytes cover all of them), each of `batch` matrices at once.
    count = max(1, work.num_kernels)
    loop = gemm_s(rows, work.n, work.k, work.batch, peak * factor * layout, cores, constants)
    moved = nbytes / count or gemm_bytes(rows, work.n, work.k, work.batch, DTYPE_BYTES[work.dtype])
    miss = 1.0 / (1.0 + (profile.l2_bytes * constants.l2_frac / moved) ** 4)
    memory = moved * (miss / (bandwidth * constants.bandwidth_frac) + (1.0 - miss) / (constants.l2_per_core * cores))
    together: float = (loop**constants.overlap + memory**constants.overlap) ** (1.0 / constants.overlap)
    # A kernel alone loses clock while it lasts; in a step the clock is that of the step, whatever the length of one kernel.
    heat = together / (together + DERATE_HALF_S) if profile.sustained_frac >= 1.0 else 1.0
    return count * (constants.start_s + together * (1.0 + constants.derate_frac * heat))


def cast_s(rows: int, columns: int, device: Device, dtype: str, profile: KernelProfile | None = None) -> float:
    """Seconds in which a low-precision product of a table also casts its `rows` x `columns` input; a lowered step has its own cast kernels."""
    constants = (profile or kernel_profile(device)).gemm(dtype)
    return constants.cast_start_s + constants.cast_s * rows * columns


def gemm_bytes(m: int, n: int, k: int, batch: int, size: float) -> float:
    """Each operand and the result once."""
    return batch * size * (m * k + k * n + m * n)


def gemm_s(m: int, n: int, k: int, batch: int, peak: float, cores: int, constants: GemmConstants) -> float:
    """Seconds of the arithmetic of `batch` m x n x k matrix products on `cores` cores that make `peak` together (no start, no memory)."""
    if cores <= 1:
        return 2.0 * batch * m * n * (k + constants.k_overhead) / (peak * constants.efficiency_frac)
    best = float("inf")
    per_core = peak * constants.efficiency_frac / cores
    partial = 8.0 * batch * m * n / (constants.l2_per_core * cores)
    for (tile_m, tile_n), tile_class in zip(TILES, TILE_CLASSES, strict=True):
        tiles = ceil(m / tile_m) * ceil(n / tile_n) * batch / cores
        step = 2.0 * tile_m * tile_n / (per_core * constants.tile_frac(tile_class))
        for split in SPLITS:
            if split > 1 and (tiles * split > SPLIT_WAVES or k < SPLIT_K * split):
                break
            seconds = _waves(tiles * split, constants.drift_frac) * step * (k / split + constants.k_overhead)
            best = min(best, seconds + (constants.split_s + split * partial if split > 1 else 0.0))
    return best


def _waves(ratio: float, drift: float) -> float:
    """Waves of `ratio` tiles per core: at least one, whole waves softened by `drift` in [0, 1] (0 = lock-step)."""
    return max(1.0, (1.0 - drift) * ceil(ratio) + drift * ratio)


def _attention_s(work: Compute, nbytes: float, device: Device, profile: KernelProfile) -> float:
    peak = peak_flops(device, work.dtype)
    frac = profile.attention_backward_frac if work.backward else profile.attention_forward_frac
    blocks = work.batch * max(1, work.heads) * ceil(max(1, work.m) / 128)
    if device.kind != "cpu":
        half = (
            profile.attention_backward_blocks_per_core if work.backward else profile.attention_forward_blocks_per_core
        ) * profile.num_cores(device)
        frac *= blocks / (blocks + half) * work.n / (work.n + HALF_LENGTH)
    if work.k > WIDE_HEAD:
        frac *= WIDE_BACKWARD_FRAC if work.backward else WIDE_FORWARD_FRAC
    peak *= clock_frac(device)
    moved = nbytes / (device.memory_bandwidth_bytes_per_s * profile.bandwidth("attention"))
    return work.num_kernels * profile.start_s + max(work.flops / (peak * frac), moved)
