"""Every prefix goes through costmodel.units: what it reads, what it refuses, what it writes."""

from __future__ import annotations

import pytest

from costmodel import units
from costmodel.errors import InputError


@pytest.mark.parametrize(
    ("parse", "text", "expected"),
    [
        (units.parse_bytes, "80GB", 80e9),
        (units.parse_bytes, "80 GiB", 80 * 2**30),
        (units.parse_bytes, "1.5 TB", 1.5e12),
        (units.parse_bytes, "512 bytes", 512),
        (units.parse_bytes, "1e3 MiB", 1000 * 2**20),
        (units.parse_bytes_per_s, "400Gb/s", 50e9),
        (units.parse_bytes_per_s, "400Gbps", 50e9),
        (units.parse_bytes_per_s, "25 Gbit/s", 3.125e9),
        (units.parse_bytes_per_s, "900 GB/s", 900e9),
        (units.parse_bytes_per_s, "3.35 TB/s", 3.35e12),
        (units.parse_bytes_per_s, "2 GiB/s", 2 * 2**30),
        (units.parse_flops_per_s, "312 TFLOP/s", 312e12),
        (units.parse_flops_per_s, "989.4 TFLOPS", 989.4e12),
        (units.parse_flops_per_s, "1.2 PFLOPs", 1.2e15),
        (units.parse_seconds, "5us", 5e-6),
        (units.parse_seconds, "5 µs", 5e-6),
        (units.parse_seconds, "12.9 ms", 12.9e-3),
        (units.parse_seconds, "2 h", 7200),
    ],
)
def test_parses(parse: object, text: str, expected: float) -> None:
    assert parse(text) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    ("parse", "text"),
    [
        (units.parse_bytes, "80"),
        (units.parse_bytes, 80),
        (units.parse_bytes, None),
        (units.parse_bytes, ""),
        (units.parse_bytes, "80Gb"),
        (units.parse_bytes, "80 gb"),
        (units.parse_bytes, "-80GB"),
        (units.parse_bytes, "GB"),
        (units.parse_bytes, "nan GB"),
        (units.parse_bytes, "1e999 GB"),
        (units.parse_bytes, "80 GB/s"),
        (units.parse_bytes_per_s, "900 GB"),
        (units.parse_bytes_per_s, "900"),
        (units.parse_bytes_per_s, "900 XB/s"),
        (units.parse_flops_per_s, "312 T"),
        (units.parse_flops_per_s, "312 TB/s"),
        (units.parse_seconds, "5"),
        (units.parse_seconds, "5 weeks"),
    ],
)
def test_refuses_with_place_and_remedy(parse: object, text: object) -> None:
    with pytest.raises(InputError) as caught:
        parse(text, where="here")
    assert caught.value.where == "here"
    assert caught.value.remedy.startswith("write for example")


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        (units.format_bytes(80 * 2**30), "80.0 GiB"),
        (units.format_bytes(1.5 * 2**40), "1.5 TiB"),
        (units.format_bytes(512), "512 B"),
        (units.format_bytes(0), "0 B"),
        (units.format_bytes(-3 * 2**20), "-3.0 MiB"),
        (units.format_seconds(0.0129), "12.9 ms"),
        (units.format_seconds(3.41), "3.41 s"),
        (units.format_seconds(8.5e-5), "85.0 us"),
        (units.format_seconds(0.9999), "1.00 s"),
        (units.format_seconds(0), "0 s"),
        (units.format_seconds(float("inf")), "inf s"),
        (units.format_seconds(90), "90.0 s"),
        (units.format_seconds(150), "2.5 min"),
        (units.format_seconds(3 * 86400), "3.0 d"),
        (units.format_bytes_per_s(900e9), "900 GB/s"),
        (units.format_bytes_per_s(3.35e12), "3.35 TB/s"),
        (units.format_flops_per_s(989.4e12), "989 TFLOP/s"),
        (units.format_flops(1.5e15), "1.50 PFLOP"),
        (units.format_percent(0.423), "42.3 %"),
        (units.format_count(8030261248), "8.03 B"),
        (units.format_count(524288), "524 K"),
        (units.format_count(12), "12"),
    ],
)
def test_writes(written: str, expected: str) -> None:
    assert written == expected
