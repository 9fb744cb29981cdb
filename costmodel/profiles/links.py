"""Achieved share of a link per collective and group size, as data.

Measured rows: NCCL 2.27-2.29 on one node, half precision, 512 B to 512 MiB (aiconfigurator-core 0.12.0, Apache-2.0), fitted by robust least squares on log
time with the protocol ladders of costmodel.collectives: bus bandwidth of an endless message over the link's bandwidth per direction, and latency. GB200 and
GB300 hosts have four devices: shares of eight are those of B200 and B300. Other devices follow the rule of their link kind.
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

    base_s, hop_s: latency of the low-latency protocol, base + hop x ring steps; exchange_base_s, exchange_hop_s: of an all-to-all, base + hop x (n - 1).
    `network_frac`: share of the cards' line rate that large messages reach.
    """

    name: str
    devices: tuple[str, ...]
    base_s: float
    hop_s: float
    exchange_base_s: float
    exchange_hop_s: float
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


def _row(name: str, latencies_s: tuple[float, float, float, float], *fracs: tuple[float, float, float]) -> LinkProfile:
    curves = [tuple(zip((2, 4, 8), values, strict=True)) for values in fracs]
    base_s, hop_s, exchange_base_s, exchange_hop_s = latencies_s
    return LinkProfile(
        name=name, devices=(name,), base_s=base_s, hop_s=hop_s, exchange_base_s=exchange_base_s, exchange_hop_s=exchange_hop_s, fracs=_curves(*curves)
    )  # fmt: skip


# Device, latencies; share of all_reduce, all_gather, reduce_scatter, all_to_all on 2, 4, 8.
PROFILES: tuple[LinkProfile, ...] = (
    _row("a100-sxm4", (8.9e-6, 0.88e-6, 10.6e-6, 0.27e-6), (0.584, 0.675, 0.718), (0.461, 0.577, 0.655), (0.524, 0.616, 0.671), (0.533, 0.622, 0.656)),
    _row("h100-sxm5", (4.6e-6, 0.80e-6, 7.0e-6, 0.05e-6), (0.617, 0.763, 0.887), (0.508, 0.645, 0.740), (0.489, 0.660, 0.779), (0.617, 0.652, 0.686)),
    _row("h200", (4.4e-6, 0.89e-6, 6.7e-6, 0.16e-6), (0.639, 0.779, 0.934), (0.518, 0.670, 0.753), (0.501, 0.678, 0.785), (0.646, 0.706, 0.693)),
    _row("b200", (7.5e-6, 1.26e-6, 9.4e-6, 0.21e-6), (0.598, 0.713, 0.780), (0.515, 0.660, 0.724), (0.457, 0.625, 0.710), (0.387, 0.569, 0.636)),
    _row("gb200", (8.1e-6, 1.21e-6, 9.8e-6, 0.25e-6), (0.599, 0.709, 0.780), (0.520, 0.664, 0.724), (0.465, 0.623, 0.710), (0.389, 0.585, 0.636)),
    _row("b300", (7.1e-6, 1.24e-6, 9.0e-6, 0.26e-6), (0.601, 0.721, 0.788), (0.520, 0.664, 0.727), (0.456, 0.630, 0.710), (0.400, 0.589, 0.674)),
    _row("gb300", (7.1e-6, 1.31e-6, 9.7e-6, 0.19e-6), (0.608, 0.725, 0.788), (0.523, 0.666, 0.727), (0.458, 0.627, 0.710), (0.412, 0.606, 0.674)),
    _row("l40s", (4.5e-6, 0.85e-6, 6.4e-6, 0.08e-6), (0.640, 0.172, 0.044), (0.617, 0.155, 0.038), (0.594, 0.170, 0.045), (0.706, 0.147, 0.037)),
    _row("rtx-pro-6000", (3.6e-6, 1.39e-6, 4.6e-6, 0.57e-6), (0.605, 0.411, 0.355), (0.505, 0.379, 0.369), (0.486, 0.368, 0.314), (0.428, 0.368, 0.266)),
)  # fmt: skip

BY_LINK: tuple[tuple[str, LinkProfile], ...] = (
    (
        "nv",
        _row(
            "nvlink rule", (7.1e-6, 1.2e-6, 9.0e-6, 0.2e-6), (0.60, 0.72, 0.79), (0.52, 0.66, 0.73), (0.47, 0.63, 0.71), (0.41, 0.60, 0.67)
        ),
    ),
    (
        "pcie",
        _row("pcie rule", (4.5e-6, 1.0e-6, 6.0e-6, 0.3e-6), (0.62, 0.40, 0.35), (0.55, 0.37, 0.33), (0.55, 0.37, 0.33), (0.55, 0.35, 0.28)),
    ),
    (
        "",
        _row(
            "generic rule", (8.0e-6, 2.0e-6, 10.0e-6, 0.3e-6), (0.65, 0.65, 0.65), (0.65, 0.65, 0.65), (0.65, 0.65, 0.65), (0.6, 0.6, 0.6)
        ),
    ),
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
