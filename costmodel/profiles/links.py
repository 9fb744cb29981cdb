"""Achieved share of a link per collective and group size, as data.

Measured rows: NCCL 2.27-2.29 on one node, half precision, 512 MiB (aiconfigurator-core 0.12.0, Apache-2.0): bus bandwidth over the link's bandwidth per
direction. base_s and hop_s: intercept and slope of the smallest messages over ring steps. Other devices follow the rule of their link kind.
"""

from __future__ import annotations

from dataclasses import dataclass

from costmodel.hardware import NodePool

# Send and receive inside a domain: 0.77 of the link on H100, 0.85 on A100, 0.72 on B200 (vidur profiles and vendor sendrecv tests); pcie alike.
P2P_FRAC = 0.75

Curve = tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkProfile:
    """`fracs`: per collective the achieved share of the fast link at group sizes; between sizes the next smaller one, beyond the ends the end.

    `network_frac`: share of the cards' line rate that large messages reach.
    """

    name: str
    devices: tuple[str, ...]
    base_s: float
    hop_s: float
    fracs: tuple[tuple[str, Curve], ...]
    network_frac: float = 0.85

    def frac(self, kind: str, size: int) -> float:
        """Share of the fast link's bandwidth that `kind` reaches on `size` ranks."""
        curve = dict(self.fracs).get(kind) or dict(self.fracs)["all_gather"]
        best = curve[0][1]
        for ranks, share in curve:
            if ranks <= size:
                best = share
        return best


def _curves(all_reduce: Curve, all_gather: Curve, reduce_scatter: Curve, all_to_all: Curve) -> tuple[tuple[str, Curve], ...]:
    pair = (("p2p", ((2, P2P_FRAC),)), ("broadcast", all_gather))
    return (("all_reduce", all_reduce), ("all_gather", all_gather), ("reduce_scatter", reduce_scatter), ("all_to_all", all_to_all), *pair)


def _row(name: str, base_s: float, hop_s: float, *fracs: tuple[float, float, float]) -> LinkProfile:
    curves = [tuple(zip((2, 4, 8), values, strict=True)) for values in fracs]
    return LinkProfile(name=name, devices=(name,), base_s=base_s, hop_s=hop_s, fracs=_curves(*curves))


PROFILES: tuple[LinkProfile, ...] = (
    _row("a100-sxm4", 8.0e-6, 1.0e-6, (0.66, 0.74, 0.76), (0.52, 0.65, 0.70), (0.57, 0.69, 0.73), (0.56, 0.66, 0.69)),
    _row("h100-sxm5", 4.6e-6, 0.8e-6, (0.72, 0.79, 1.02), (0.59, 0.72, 0.76), (0.57, 0.70, 0.76), (0.63, 0.65, 0.71)),
    _row("h200", 4.6e-6, 0.8e-6, (0.71, 0.79, 1.05), (0.58, 0.71, 0.76), (0.56, 0.70, 0.76), (0.67, 0.72, 0.70)),
    _row("b200", 7.8e-6, 1.2e-6, (0.61, 0.72, 0.81), (0.50, 0.65, 0.71), (0.47, 0.63, 0.71), (0.38, 0.55, 0.64)),
    _row("gb200", 7.8e-6, 1.2e-6, (0.61, 0.72, 0.81), (0.50, 0.65, 0.71), (0.47, 0.63, 0.71), (0.38, 0.55, 0.64)),
    _row("b300", 7.8e-6, 1.2e-6, (0.62, 0.72, 0.81), (0.51, 0.65, 0.71), (0.48, 0.64, 0.71), (0.39, 0.57, 0.66)),
    _row("gb300", 7.8e-6, 1.2e-6, (0.62, 0.72, 0.81), (0.51, 0.65, 0.71), (0.48, 0.64, 0.71), (0.39, 0.57, 0.66)),
    _row("l40s", 4.6e-6, 0.9e-6, (0.64, 0.165, 0.046), (0.62, 0.15, 0.038), (0.60, 0.16, 0.054), (0.71, 0.143, 0.063)),
    _row("rtx-pro-6000", 4.6e-6, 1.0e-6, (0.61, 0.42, 0.39), (0.51, 0.37, 0.365), (0.53, 0.38, 0.375), (0.41, 0.385, 0.29)),
)

BY_LINK: tuple[tuple[str, LinkProfile], ...] = (
    ("nv", _row("nvlink rule", 6.0e-6, 1.0e-6, (0.68, 0.75, 0.80), (0.55, 0.68, 0.73), (0.55, 0.68, 0.74), (0.55, 0.63, 0.69))),
    ("pcie", _row("pcie rule", 5.0e-6, 1.0e-6, (0.62, 0.40, 0.35), (0.55, 0.37, 0.33), (0.55, 0.37, 0.33), (0.55, 0.35, 0.28))),
    ("", _row("generic rule", 8.0e-6, 2.0e-6, (0.65, 0.65, 0.65), (0.65, 0.65, 0.65), (0.65, 0.65, 0.65), (0.6, 0.6, 0.6))),
)


def link_profile(pool: NodePool) -> LinkProfile:
    """The row measured on the pool's device, else the rule of its fast link's kind."""
    for row in PROFILES:
        if any(pool.device.device_id.startswith(prefix) for prefix in row.devices):
            return row
    kind = pool.fast_link.kind.lower()
    return next(row for prefix, row in BY_LINK if kind.startswith(prefix))


def measured(pool: NodePool) -> bool:
    """Whether the pool's device has its own row."""
    return any(pool.device.device_id.startswith(prefix) for row in PROFILES for prefix in row.devices)
