"""The only place with unit prefixes: reads what people write ("80GB", "400Gb/s", "5us"), writes what people read ("80.0 GiB", "12.9 ms").

Decimal prefixes are powers of 1000 (1 GB = 1e9 bytes), binary ones powers of 1024 (1 GiB = 2**30 bytes). `b` is a bit and `B` a byte, so case matters there:
400 Gb/s is 50 GB/s. Inside the packages everything is SI: bytes, seconds, flops, bytes per second.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable

from costmodel.errors import InputError, shown

KIB, MIB, GIB, TIB = 2**10, 2**20, 2**30, 2**40
KB, MB, GB, TB = 1e3, 1e6, 1e9, 1e12
MILLION, TERA = 1e6, 1e12

_DECIMAL = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15, "E": 1e18}
_BINARY = {"Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40, "Pi": 2.0**50}
_SECONDS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_QUANTITY = re.compile(r"([+-]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?)\s*([^\d\s].*)?")


def parse_bytes(text: object, *, where: str = "") -> float:
    """Bytes in "80GB" (8e10), "80 GiB", "512 MiB". Raises InputError when the unit is missing or is not one of bytes."""
    return _parse(text, _byte_scale, "80GB or 80GiB", where)


def parse_bytes_per_s(text: object, *, where: str = "") -> float:
    """Bytes per second in "900 GB/s", "400Gb/s", "400Gbps", "3.35 TB/s". Raises InputError."""
    return _parse(text, _byte_rate_scale, "900 GB/s or 400 Gb/s", where)


def parse_flops_per_s(text: object, *, where: str = "") -> float:
    """Flops per second in "312 TFLOP/s", "312 TFLOPS", "1.2 PFLOP/s". Raises InputError."""
    return _parse(text, _flop_rate_scale, "312 TFLOP/s", where)


def parse_seconds(text: object, *, where: str = "") -> float:
    """Seconds in "5us", "12.9 ms", "3.41 s", "2 h". Raises InputError."""
    return _parse(text, _SECONDS.get, "5us or 1.5ms", where)


def _parse(text: object, scale_of: Callable[[str], float | None], example: str, where: str) -> float:
    match = _QUANTITY.fullmatch(text.strip()) if isinstance(text, str) else None
    if match is None:
        raise InputError(f"{shown(text)} is not a quantity with a unit", where=where, remedy=f"write for example {example}")
    scale = scale_of((match[2] or "").strip())
    if scale is None:
        unit = f"unit {match[2].strip()!r} is not known here" if match[2] else f"{text!r} has no unit"
        raise InputError(unit, where=where, remedy=f"write for example {example} (b is a bit, B a byte)")
    value = float(match[1]) * scale
    if not math.isfinite(value) or value < 0:
        raise InputError(f"{text!r} is {'negative' if value < 0 else 'too large'}", where=where, remedy=f"write for example {example}")
    return value


def _byte_scale(unit: str) -> float | None:
    if unit in ("byte", "bytes"):
        return 1.0
    return _prefix_scale(unit[:-1]) if unit.endswith("B") else None


def _prefix_scale(prefix: str) -> float | None:
    return _DECIMAL.get(prefix, _BINARY.get(prefix))


def _byte_rate_scale(unit: str) -> float | None:
    match = re.fullmatch(r"([kKMGTPE]i?|)(B|b|bit)(?:/s|ps)", unit)
    factor = _prefix_scale(match[1]) if match else None
    if match is None or factor is None:
        return None
    return factor if match[2] == "B" else factor / 8


def _flop_rate_scale(unit: str) -> float | None:
    match = re.fullmatch(r"([kKMGTPE]?)(?:FLOPS|FLOPs|FLOP/s|FLOPs/s|flops|flop/s|flops/s|OPS|OP/s)", unit)
    return _DECIMAL[match[1]] if match else None


def format_bytes(num_bytes: float) -> str:
    """Binary prefixes, one decimal: "80.0 GiB", "512 B"."""
    for symbol, scale in (("TiB", TIB), ("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if abs(num_bytes) >= 0.99995 * scale:
            return f"{num_bytes / scale:.1f} {symbol}"
    return f"{num_bytes:.0f} B"


def format_seconds(seconds: float) -> str:
    """Three significant digits: "12.9 ms", "3.41 s", "85.0 us"; from two minutes on "2.5 min", "3.2 h", "12.0 d"."""
    if abs(seconds) >= 120 and math.isfinite(seconds):
        for symbol, scale in (("d", 172800.0), ("h", 7200.0), ("min", 120.0)):
            if abs(seconds) >= scale:
                return f"{seconds / _SECONDS[symbol]:.1f} {symbol}"
    return _with_prefix(seconds, "s", (("", 1.0), ("m", 1e-3), ("u", 1e-6), ("n", 1e-9)))


def format_bytes_per_s(rate: float) -> str:
    """Decimal prefixes, as datasheets print them: "900 GB/s", "3.35 TB/s"."""
    return _with_prefix(rate, "B/s", _LARGE)


def format_flops(flops: float) -> str:
    """A number of floating-point operations: "312 TFLOP"."""
    return _with_prefix(flops, "FLOP", _LARGE)


def format_flops_per_s(rate: float) -> str:
    """A rate: "989 TFLOP/s"."""
    return _with_prefix(rate, "FLOP/s", _LARGE)


def format_percent(fraction: float) -> str:
    """0.423 -> "42.3 %"."""
    return f"{100 * fraction:.1f} %"


def format_count(count: float) -> str:
    """Parameters, tokens: 8030261248 -> "8.03 B", 524288 -> "524 K", 12 -> "12"."""
    if abs(count) < 1000:
        return f"{count:.0f}"
    return _with_prefix(count, "", (("T", 1e12), ("B", 1e9), ("M", 1e6), ("K", 1e3)))


_LARGE = (("E", 1e18), ("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3), ("", 1.0))


def _with_prefix(value: float, unit: str, prefixes: tuple[tuple[str, float], ...]) -> str:
    if not math.isfinite(value) or value == 0:
        return f"{value:.0f} {unit}".strip()
    chosen = next((item for item in prefixes if abs(value) >= 0.9995 * item[1]), prefixes[-1])
    return f"{_three_digits(value / chosen[1])} {chosen[0]}{unit}"


def _three_digits(value: float) -> str:
    size = abs(value)
    return f"{value:.0f}" if size >= 99.95 else f"{value:.1f}" if size >= 9.995 else f"{value:.2f}"
