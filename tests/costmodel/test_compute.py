"""Kernels: roofline, tiles and waves, missing dtypes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from costmodel.compute import compute_s
from costmodel.errors import InputError
from costmodel.work import Compute
from tests.costmodel.steps import CPU, H100, V100, elementwise, gemm


def test_large_gemm_runs_near_but_below_peak() -> None:
    work = gemm("g", 8192, 8192, 8192)
    share = work.flops / compute_s(work, H100) / 989.4e12
    assert 0.65 < share < 0.90


def test_small_gemm_is_far_from_peak_and_never_below_the_start() -> None:
    work = gemm("g", 128, 128, 128)
    seconds = compute_s(work, H100)
    assert seconds >= 2e-6
    assert work.flops / seconds < 0.01 * 989.4e12


def test_one_tile_more_than_a_wave_costs_more_than_its_flops() -> None:
    """132 tiles of 128 x 256 fill an H100; one more row of tiles starts another wave."""
    full, spilled = gemm("g", 128 * 12, 256 * 11, 4096), gemm("g", 128 * 12 + 1, 256 * 11, 4096)
    assert compute_s(spilled, H100) > compute_s(full, H100) * 1.02


def test_elementwise_is_bound_by_bandwidth() -> None:
    work = elementwise("add", 2e9, 1e9)
    assert 3e9 / 3.35e12 < compute_s(work, H100) < 1.5 * 3e9 / 3.35e12


def test_time_grows_with_every_dimension() -> None:
    base = compute_s(gemm("g", 4096, 4096, 4096), H100)
    for m, n, k in ((8192, 4096, 4096), (4096, 8192, 4096), (4096, 4096, 8192)):
        assert compute_s(gemm("g", m, n, k), H100) > base


def test_a_gemm_of_few_bytes_of_flops_is_bound_by_memory() -> None:
    work = gemm("g", 16384, 16384, 8)
    assert compute_s(work, H100) > (work.read_bytes + work.write_bytes) / 3.35e12


def test_bf16_on_v100_is_refused_with_what_it_has() -> None:
    with pytest.raises(InputError, match=r"v100-sxm2-16gb has no bf16 units \(it has fp16, fp32\)"):
        compute_s(gemm("g", 512, 512, 512), V100)


def test_fp32_uses_the_plain_fp32_peak() -> None:
    work = gemm("g", 4096, 4096, 4096, dtype="fp32")
    assert compute_s(work, H100) > work.flops / 66.9e12


def test_cpu_rank_computes_bf16_at_its_own_rate() -> None:
    work = gemm("g", 512, 512, 512)
    assert compute_s(work, CPU) >= work.flops / 1.6e11


def test_attention_backward_costs_more_than_forward() -> None:
    work = Compute(name="a", op_class="attention", flops=1e12, m=4096, n=4096, k=128, heads=32, causal=True)
    forward, backward = compute_s(work, H100), compute_s(replace(work, flops=2.5e12, backward=True), H100)
    assert 2.5 < backward / forward < 5.0
