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
    ("a100", "bf16", 0.933, (0.790, 0.658, 0.516), 190, 0.14, 2.4, 2.4, 0.673, 38, 0.10, 3.5, 0.130),
    ("b200", "bf16", 0.747, (0.461, 0.962, 0.728), 79, 0.72, 3.0, 2.0, 0.794, 31, 0.17, 2.7, 0.177),
    ("b200", "fp8", 0.741, (0.499, 0.942, 0.653), 122, 0.61, 3.6, 2.0, 0.796, 36, 1.29, 2.2, 0.134, 12.6, 1.12),
    ("b200", "fp8_block", 0.695, (0.595, 1.000, 0.501), 13, 0.84, 20.0, 2.0, 0.421, 20, 0.24, 3.5, 0.221, 3.9, 0.47),
    ("b200", "fp4", 0.555, (0.600, 0.307, 0.200), 400, 0.29, 20.0, 2.0, 0.729, 34, 1.02, 2.1, 0.143, 4.9, 0.69),
    ("b300", "bf16", 0.770, (0.833, 0.980, 0.707), 66, 0.80, 2.7, 1.9, 0.809, 33, 0.13, 3.0, 0.189),
    ("b300", "fp8", 0.767, (0.977, 0.961, 0.744), 57, 0.52, 7.0, 1.9, 0.789, 36, 1.22, 2.3, 0.168, 12.2, 1.10),
    ("b300", "fp8_block", 0.793, (0.302, 0.967, 0.482), 67, 0.81, 20.0, 1.9, 0.464, 21, 0.45, 3.2, 0.250, 3.7, 0.44),
    ("b300", "fp4", 0.463, (0.588, 0.305, 0.200), 400, 0.11, 20.0, 1.9, 0.300, 14, 0.76, 2.7, 0.023, 7.1, 0.55),
    ("gb200", "bf16", 0.698, (0.304, 0.979, 0.744), 55, 0.77, 3.2, 2.0, 0.794, 30, 0.10, 2.8, 0.160),
    ("gb200", "fp8", 0.636, (0.304, 0.957, 0.783), 119, 0.63, 8.3, 2.0, 0.780, 36, 1.00, 2.5, 0.000, 12.4, 1.07),
    ("gb200", "fp8_block", 0.670, (0.978, 0.991, 0.534), 74, 0.69, 20.0, 2.0, 0.456, 22, 1.73, 3.5, 0.159, 3.8, 0.47),
    ("gb200", "fp4", 0.514, (0.646, 0.325, 0.200), 400, 0.21, 20.0, 2.0, 0.672, 30, 1.17, 2.7, 0.000, 4.7, 0.64),
    ("gb300", "bf16", 0.798, (0.304, 0.973, 0.690), 38, 0.72, 2.8, 2.1, 0.829, 34, 0.15, 2.4, 0.072),
    ("gb300", "fp8", 0.774, (0.960, 0.961, 0.687), 104, 0.49, 7.7, 2.1, 0.865, 35, 1.27, 2.2, 0.000, 12.1, 1.09),
    ("gb300", "fp8_block", 0.763, (0.716, 1.000, 0.400), 10, 0.64, 20.0, 2.1, 0.457, 21, 0.35, 3.5, 0.162, 3.6, 0.47),
    ("gb300", "fp4", 0.449, (0.553, 0.300, 0.200), 400, 0.09, 20.0, 2.1, 0.300, 14, 1.24, 2.9, 0.019, 7.1, 0.53),
    ("h100", "bf16", 0.861, (0.981, 0.978, 0.838), 175, 0.69, 2.1, 2.6, 0.794, 27, 0.64, 4.8, 0.104),
    ("h100", "fp8", 0.777, (0.304, 1.000, 0.999), 274, 0.91, 0.2, 2.6, 0.702, 22, 0.29, 7.6, 0.032, 9.6, 2.29),
    ("h100", "fp8_block", 0.681, (1.000, 0.467, 0.639), 75, 0.00, 5.6, 2.6, 0.490, 17, 0.43, 1.6, 0.068, 1.9, 1.48),
    ("h200", "bf16", 0.867, (1.000, 1.000, 0.872), 176, 0.82, 2.3, 2.6, 0.886, 38, 0.70, 2.9, 0.166),
    ("h200", "fp8", 0.782, (0.983, 1.000, 0.955), 291, 0.98, 0.3, 2.6, 0.645, 19, 1.75, 9.5, 0.021, 9.2, 2.05),
    ("h200", "fp8_block", 0.719, (1.000, 0.641, 0.660), 295, 0.07, 20.0, 2.6, 0.367, 21, 0.46, 1.9, 0.118, 1.6, 1.50),
    ("l40s", "bf16", 0.727, (0.909, 0.755, 0.750), 102, 0.55, 2.4, 1.6, 0.828, 60, 0.86, 2.6, 0.238),
    ("l40s", "fp8", 0.617, (0.991, 0.420, 0.826), 13, 0.34, 0.0, 1.6, 0.783, 14, 0.84, 2.3, 0.260, 10.6, 1.40),
    ("l40s", "fp8_block", 0.368, (0.764, 0.773, 0.964), 86, 0.26, 1.3, 1.6, 0.833, 7, 0.68, 2.7, 0.338, 1.1, 1.35),
    ("rtx-pro-6000", "bf16", 0.924, (0.926, 0.751, 0.710), 154, 0.53, 1.6, 1.7, 0.913, 36, 0.74, 10.0, 0.040),
    ("rtx-pro-6000", "fp8", 0.873, (0.902, 0.803, 0.739), 148, 0.08, 1.9, 1.7, 0.983, 18, 0.96, 2.5, 0.072, 10.3, 0.96),
    ("rtx-pro-6000", "fp8_block", 0.683, (0.301, 1.000, 1.000), 400, 1.00, 0.0, 1.7, 0.524, 60, 0.10, 3.2, 0.000, 28.3, 3.04),
    ("rtx-pro-6000", "fp4", 0.818, (1.000, 0.606, 0.315), 257, 0.00, 20.0, 1.7, 0.948, 15, 0.85, 3.1, 0.104, 3.0, 0.61),
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
