"""Kernel efficiency per architecture, as data: fitted by tests/bench/fit_kernels.py, residuals in docs/cost-model.md.

`devices` names the device_ids (prefixes) that were measured; another device of the same `arch` uses the row and is flagged as extrapolated, a device of
an unknown architecture uses the nearest row by kind.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from costmodel.hardware import Device
from costmodel.profiles.gemm import GemmConstants, gemm_table

# Streaming speed of kernels that reduce rows or gather them, relative to a plain copy or add.
REDUCTION_FRAC = {"norm": 0.85, "softmax": 0.85, "reduce": 0.85, "cross_entropy": 0.85, "embedding": 0.6, "index": 0.6}

# Attention kernels relative to FlashAttention 2. "triton": FlashAttention 1 in Triton, with ALiBi, as LLM Foundry ran it: its 13 runs at 16k to 65k
# tokens, where attention is most of the step, on A100 and H100 (0.55-0.64).
ATTENTION_OVER_FLASH2 = {"flash2": 1.0, "triton": 0.58}


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelProfile:
    """All kernel constants of one architecture.

    core_flops: bf16 (fp16 where there is none) peak of one core, which counts the cores of a device. start_s: floor of a kernel that is no matmul.
    l2_bytes: second-level cache (datasheet).
    bandwidth_frac: achieved share of memory bandwidth of large streaming kernels; REDUCTION_FRAC lowers it for the classes that reduce or look up.
    sustained_frac: matmul speed inside a training step over the speed of the short bursts that the GEMM table holds (clocks under the power limit).
    attention_*_blocks_per_core: blocks of 128 queries per core at half speed.
    attention_*_frac: of peak, causal flops, for endless sequences on all cores, with the architecture's best kernel (FlashAttention 2 on Ampere and Ada,
    3 or cuDNN on Hopper, cuDNN on Blackwell); flash2_frac: FlashAttention 2 relative to that.
    """

    name: str
    devices: tuple[str, ...]
    archs: tuple[str, ...]
    core_flops: float
    l2_bytes: float
    gemms: tuple[tuple[str, GemmConstants], ...]
    start_s: float
    bandwidth_frac: float
    sustained_frac: float
    attention_forward_frac: float
    attention_backward_frac: float
    flash2_frac: float
    source: str
    attention_forward_blocks_per_core: float = 1.6
    attention_backward_blocks_per_core: float = 0.6

    def gemm(self, dtype: str) -> GemmConstants:
        """Constants of `dtype`; the first row (bf16) when that dtype was not measured."""
        return dict(self.gemms).get(dtype, self.gemms[0][1])

    def bandwidth(self, op_class: str) -> float:
        """Achieved fraction of memory bandwidth of large kernels of `op_class`."""
        return self.bandwidth_frac * REDUCTION_FRAC.get(op_class, 1.0)

    def with_attention(self, kernel: str) -> KernelProfile:
        """The profile with the attention kernels of one generation (Engine.attention_kernel) in place of the architecture's best."""
        if kernel == "native":
            return self
        frac = self.flash2_frac * ATTENTION_OVER_FLASH2[kernel]
        return replace(
            self, attention_forward_frac=self.attention_forward_frac * frac, attention_backward_frac=self.attention_backward_frac * frac
        )

    def num_cores(self, device: Device) -> int:
        """Cores (SMs) of `device` by its half-precision peak."""
        peak = device.peak("bf16") or device.peak("fp16") or device.peak("fp32")
        return max(1, round(peak / self.core_flops))

    def measured(self, device: Device) -> bool:
        """Whether the constants were measured on this very device."""
        return any(device.device_id.startswith(prefix) for prefix in self.devices)


_H100 = KernelProfile(
    name="h100",
    devices=("h100-sxm5", "h800"),
    archs=("hopper",),
    core_flops=989.4e12 / 132,
    l2_bytes=50e6,
    gemms=gemm_table("h100", accumulate_frac=0.945),
    start_s=2.5e-6,
    bandwidth_frac=0.9,
    sustained_frac=0.89,
    attention_forward_frac=0.68,
    attention_backward_frac=0.52,
    flash2_frac=0.58,
    source="aiconfigurator-core 0.12.0 h100-sxm5-80gb GEMM table (Apache-2.0)",
)

_B200 = KernelProfile(
    name="b200",
    devices=("b200",),
    archs=("blackwell",),
    core_flops=2250e12 / 148,
    l2_bytes=126e6,
    gemms=gemm_table("b200", accumulate_frac=0.93, grouped_frac=0.8, grouped_accumulate_frac=0.85),
    start_s=2.5e-6,
    bandwidth_frac=0.88,
    sustained_frac=0.68,
    attention_forward_frac=0.6,
    attention_backward_frac=0.44,
    attention_forward_blocks_per_core=3.7,
    flash2_frac=0.35,
    source="aiconfigurator-core 0.12.0 b200-sxm GEMM table (Apache-2.0)",
)

_L40S = KernelProfile(
    name="l40s",
    devices=("l40s",),
    archs=("ada",),
    core_flops=362.05e12 / 142,
    l2_bytes=96e6,
    gemms=gemm_table("l40s", accumulate_frac=0.955),
    start_s=2.5e-6,
    bandwidth_frac=0.88,
    sustained_frac=0.9,
    attention_forward_frac=0.65,
    attention_backward_frac=0.5,
    flash2_frac=1.0,
    source="aiconfigurator-core 0.12.0 l40s GEMM table (Apache-2.0)",
)

PROFILES: tuple[KernelProfile, ...] = (
    KernelProfile(
        name="a100",
        devices=("a100-sxm4", "a100-pcie", "a800"),
        archs=("ampere",),
        core_flops=312e12 / 108,
        l2_bytes=40e6,
        gemms=gemm_table("a100", accumulate_frac=0.955),
        start_s=2.5e-6,
        bandwidth_frac=0.88,
        sustained_frac=0.93,
        attention_forward_frac=0.7,
        attention_backward_frac=0.54,
        flash2_frac=1.0,
        source="aiconfigurator-core 0.12.0 a100-sxm4-80gb GEMM table (Apache-2.0)",
    ),
    _H100,
    replace(
        _H100,
        name="h200",
        devices=("h200",),
        archs=(),
        gemms=gemm_table("h200", accumulate_frac=0.945),
        source="aiconfigurator-core 0.12.0 h200-sxm GEMM table (Apache-2.0)",
    ),
    _B200,
    replace(
        _B200,
        name="gb200",
        devices=("gb200",),
        archs=(),
        core_flops=2500e12 / 152,
        gemms=gemm_table("gb200", accumulate_frac=0.93, grouped_frac=0.8, grouped_accumulate_frac=0.85),
        source="aiconfigurator-core 0.12.0 gb200 GEMM table (Apache-2.0)",
    ),
    replace(
        _B200,
        name="b300",
        devices=("b300",),
        archs=("blackwell-ultra",),
        gemms=gemm_table("b300", accumulate_frac=0.93, grouped_frac=0.8, grouped_accumulate_frac=0.85),
        source="aiconfigurator-core 0.12.0 b300-sxm GEMM table (Apache-2.0)",
    ),
    replace(
        _B200,
        name="gb300",
        devices=("gb300",),
        archs=(),
        core_flops=2500e12 / 152,
        gemms=gemm_table("gb300", accumulate_frac=0.93, grouped_frac=0.8, grouped_accumulate_frac=0.85),
        source="aiconfigurator-core 0.12.0 gb300 GEMM table (Apache-2.0)",
    ),
    _L40S,
    replace(
        _L40S,
        name="rtx-pro-6000",
        devices=("rtx-pro-6000",),
        archs=(),
        core_flops=467.8e12 / 188,
        l2_bytes=128e6,
        gemms=gemm_table("rtx-pro-6000", accumulate_frac=0.955),
        source="aiconfigurator-core 0.12.0 rtx-pro-6000-server GEMM table (Apache-2.0)",
    ),
)

CPU = KernelProfile(
    name="cpu",
    devices=(),
    archs=(),
    core_flops=1.0,
    l2_bytes=1.0,
    gemms=(("fp32", GemmConstants(efficiency_frac=0.9, k_overhead=16, drift_frac=1.0, start_s=5e-6)),),
    start_s=5e-6,
    bandwidth_frac=0.7,
    sustained_frac=1.0,
    attention_forward_frac=0.5,
    attention_backward_frac=0.5,
    flash2_frac=1.0,
    source="rule: one CPU rank; measured by calibration",
)


def kernel_profile(device: Device) -> KernelProfile:
    """The row measured on `device`, else the row of its architecture, the CPU row for CPU ranks, else the first row."""
    for row in PROFILES:
        if row.measured(device):
            return row
    if device.kind == "cpu":
        return CPU
    for row in PROFILES:
        if device.arch in row.archs:
            return row
    return PROFILES[0]
