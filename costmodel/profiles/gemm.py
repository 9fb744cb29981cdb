"""GEMM constants per measured device and dtype, as data: written by tests/bench/fit_kernels.py, residuals in docs/cost-model.md.

Source of every row: aiconfigurator-core 0.12.0 GEMM tables (Apache-2.0), 2,000 shapes a device and dtype with m >= 256, four fifths of the (n, k) pairs used.
Formula: costmodel/compute.py. fp8: one scale per tensor or row; fp8_block: 128 x 128 blocks; fp4: NVFP4, blocks of 16.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class GemmConstants:
    """efficiency_frac: of peak in the main loop of the largest tiles; square_frac, half_frac, small_frac: of that in 128x128, 128x64 and 64x64 tiles.
    k_overhead: k steps that prologue and epilogue of a tile cost. drift_frac: softness of waves. split_s: extra launch and wait of a split k.
    start_s: floor of one kernel. bandwidth_frac: of memory bandwidth. l2_per_core: L2 bytes/s of one core. l2_frac: of the L2 that keeps operands between
    kernels. overlap: order of the norm that joins arithmetic and memory (large = the longer alone). derate_frac: loss of clock of kernels beyond 1 ms.
    cast_start_s, cast_s: the cast of the input that the table's row holds beside the product, floor and per element; a lowered step has its own cast kernels.
    grouped_frac: grouped GEMM over one GEMM of the same tiles. nn_frac, nt_frac: input-gradient (NN) and weight-gradient (NT) layouts relative to TN;
    accumulate_frac: adding into a gradient; grouped_accumulate_frac: the same once more for grouped GEMM."""

    efficiency_frac: float
    square_frac: float = 1.0
    half_frac: float = 1.0
    small_frac: float = 1.0
    k_overhead: int
    drift_frac: float
    split_s: float = 2e-6
    start_s: float
    bandwidth_frac: float = 0.8
    l2_per_core: float = 3e10
    l2_frac: float = 0.5
    overlap: float = 4.0
    derate_frac: float = 0.0
    cast_start_s: float = 0.0
    cast_s: float = 0.0
    grouped_frac: float = 0.9
    nn_frac: float = 1.0
    nt_frac: float = 1.0
    accumulate_frac: float = 1.0
    grouped_accumulate_frac: float = 1.0

    def layout_frac(self, layout: str, accumulate: bool) -> float:
        """Speed of `layout` relative to TN."""
        frac = {"NN": self.nn_frac, "NT": self.nt_frac}.get(layout, 1.0)
        return frac * (self.accumulate_frac if accumulate else 1.0)

    def tile_frac(self, tile_class: str) -> float:
        """Main-loop speed of a class of tiles relative to the largest."""
        return {"square": self.square_frac, "half": self.half_frac, "small": self.small_frac}.get(tile_class, 1.0)


# Device, dtype; efficiency, (square, half, small), k_overhead, drift, split us, start us, bandwidth, L2 GB/s a core, L2 kept, overlap, derate;
# cast us, ps an element.
ROWS: tuple[tuple[str, str, float, tuple[float, float, float], *tuple[float, ...]], ...] = (
    ("a100", "bf16", 0.933, (0.790, 0.658, 0.516), 190, 0.14, 2.4, 2.4, 0.674, 38, 0.10, 3.5, 0.130),
    ("b200", "bf16", 0.747, (0.205, 0.961, 0.725), 79, 0.72, 3.0, 2.0, 0.794, 31, 0.17, 2.7, 0.178),
    ("b200", "fp8", 0.722, (1.007, 0.972, 0.682), 93, 0.58, 3.5, 2.0, 0.787, 35, 1.33, 2.2, 0.111, 12.6, 1.13),
    ("b200", "fp8_block", 0.644, (0.971, 1.082, 0.550), 19, 0.82, 20.0, 2.0, 0.425, 21, 0.54, 3.7, 0.227, 4.0, 0.47),
    ("b200", "fp4", 0.555, (0.600, 0.307, 0.200), 400, 0.29, 20.0, 2.0, 0.729, 34, 1.02, 2.1, 0.143, 4.9, 0.69),
    ("b300", "bf16", 0.767, (0.965, 0.979, 0.711), 66, 0.83, 2.7, 1.9, 0.811, 34, 0.13, 3.1, 0.174),
    ("b300", "fp8", 0.768, (0.970, 0.961, 0.744), 58, 0.54, 7.0, 1.9, 0.789, 36, 1.23, 2.3, 0.170, 12.2, 1.10),
    ("b300", "fp8_block", 0.725, (1.071, 1.066, 0.511), 52, 0.72, 20.0, 1.9, 0.462, 21, 0.45, 3.2, 0.225, 3.7, 0.44),
    ("b300", "fp4", 0.464, (0.594, 0.238, 0.200), 400, 0.11, 20.0, 1.9, 0.300, 14, 0.75, 2.7, 0.026, 7.1, 0.55),
    ("gb200", "bf16", 0.593, (0.994, 1.153, 0.877), 49, 0.77, 3.2, 2.0, 0.792, 30, 0.10, 2.7, 0.144),
    ("gb200", "fp8", 0.610, (1.032, 1.003, 0.845), 107, 0.62, 8.0, 2.0, 0.784, 36, 1.10, 2.5, 0.001, 12.5, 1.08),
    ("gb200", "fp8_block", 0.660, (0.839, 1.001, 0.531), 64, 0.71, 20.0, 2.0, 0.444, 21, 0.27, 3.4, 0.134, 3.7, 0.47),
    ("gb200", "fp4", 0.514, (0.646, 0.325, 0.200), 400, 0.21, 20.0, 2.0, 0.672, 30, 1.17, 2.7, 0.000, 4.7, 0.64),
    ("gb300", "bf16", 0.800, (0.205, 0.972, 0.685), 42, 0.71, 2.8, 2.1, 0.828, 34, 0.15, 2.4, 0.079),
    ("gb300", "fp8", 0.774, (0.848, 0.961, 0.687), 105, 0.49, 7.8, 2.1, 0.865, 35, 1.26, 2.2, 0.000, 12.1, 1.09),
    ("gb300", "fp8_block", 0.733, (0.777, 1.040, 0.486), 0, 0.65, 20.0, 2.1, 0.456, 21, 0.35, 3.5, 0.161, 3.6, 0.47),
    ("gb300", "fp4", 0.450, (0.553, 0.298, 0.200), 400, 0.09, 20.0, 2.1, 0.300, 14, 1.24, 2.9, 0.020, 7.1, 0.53),
    ("h100", "bf16", 0.786, (1.103, 1.071, 1.044), 169, 0.49, 2.3, 2.7, 0.802, 28, 0.62, 4.4, 0.111),
    ("h100", "fp8", 0.760, (0.546, 0.494, 1.017), 267, 1.00, 0.1, 2.7, 0.702, 22, 0.29, 7.2, 0.026, 9.5, 2.30),
    ("h100", "fp8_block", 0.567, (1.200, 0.610, 0.735), 81, 0.00, 5.8, 2.7, 0.492, 18, 0.42, 1.6, 0.068, 1.8, 1.47),
    ("h200", "bf16", 0.767, (0.993, 1.126, 0.982), 174, 0.82, 2.0, 2.5, 0.895, 23, 0.10, 3.0, 0.160),
    ("h200", "fp8", 0.763, (0.833, 1.025, 0.978), 291, 0.97, 0.3, 2.5, 0.645, 19, 1.69, 9.0, 0.022, 9.3, 2.04),
    ("h200", "fp8_block", 0.730, (0.275, 0.883, 0.765), 270, 0.25, 20.0, 2.5, 0.369, 20, 0.48, 1.8, 0.122, 1.9, 1.54),
    ("l40s", "bf16", 0.725, (0.911, 0.728, 0.727), 103, 0.56, 2.6, 1.5, 0.822, 120, 0.85, 2.6, 0.237),
    ("l40s", "fp8", 0.580, (1.064, 0.879, 0.870), 20, 0.33, 0.0, 1.5, 0.782, 14, 0.84, 2.4, 0.266, 10.7, 1.40),
    ("l40s", "fp8_block", 0.314, (0.859, 0.930, 1.118), 75, 0.24, 1.3, 1.5, 0.824, 7, 0.68, 2.6, 0.295, 1.2, 1.29),
    ("rtx-pro-6000", "bf16", 0.924, (0.926, 0.751, 0.710), 154, 0.53, 1.6, 1.7, 0.913, 36, 0.74, 10.0, 0.040),
    ("rtx-pro-6000", "fp8", 0.864, (0.901, 0.796, 0.747), 150, 0.20, 1.8, 1.7, 0.978, 17, 0.97, 2.6, 0.066, 10.3, 0.96),
    ("rtx-pro-6000", "fp8_block", 0.664, (0.351, 0.352, 1.028), 400, 1.00, 0.0, 1.7, 0.522, 120, 0.10, 3.2, 0.000, 28.3, 3.05),
    ("rtx-pro-6000", "fp4", 0.682, (1.200, 0.724, 0.378), 262, 0.00, 20.0, 1.7, 0.947, 15, 0.85, 3.2, 0.106, 3.0, 0.61),
)  # fmt: skip


def gemm_table(
    device: str, *, grouped_frac: float = 0.9, accumulate_frac: float = 1.0, grouped_accumulate_frac: float = 1.0
) -> tuple[tuple[str, GemmConstants], ...]:
    """(dtype, constants) of a measured device, with what its training kernels lose."""
    found = []
    for _, dtype, efficiency, (square, half, small), *rest in (row for row in ROWS if row[0] == device):
        k_overhead, drift, split, start, bandwidth, l2_rate, l2_frac, overlap, derate, *cast = rest
        constants = GemmConstants(
            efficiency_frac=efficiency, square_frac=square, half_frac=half, small_frac=small, k_overhead=round(k_overhead), drift_frac=drift,
            split_s=split * 1e-6, start_s=start * 1e-6, bandwidth_frac=bandwidth, l2_per_core=l2_rate * 1e9, l2_frac=l2_frac, overlap=overlap,
            derate_frac=derate, cast_start_s=cast[0] * 1e-6 if cast else 0.0, cast_s=cast[1] * 1e-12 if cast else 0.0, grouped_frac=grouped_frac,
            accumulate_frac=accumulate_frac, grouped_accumulate_frac=grouped_accumulate_frac,
        )  # fmt: skip
        found.append((dtype, constants))
    return tuple(found)
