"""Seconds of one collective: alpha-beta per protocol and tier.

Inside a fast domain of p ranks (NCCL's protocols LL, LL128 and Simple: more latency buys more bandwidth; whichever ends first):

    t = min over protocols ( latency x alpha + f S / (share x B frac) )          alpha = base + hop x steps
    rings: (latency, share) = (1, 0.05), (1.15, 0.55), (3, 1);   all_to_all, p2p: (1, 0.04), (1.6, 0.8), (3.2, 1)
    f: all_reduce 2 (n-1)/n, all_gather, reduce_scatter, all_to_all (n-1)/n, broadcast and p2p 1
    steps: all_reduce 2 (n-1), all_gather, reduce_scatter n - 1, broadcast 1; all_to_all n - 1 and p2p 1 with the exchange's base and hop

`frac` is the achieved share of the link for (kind, n), measured for the devices in costmodel/profiles/links.py, by rule of the link kind elsewhere.
Over N > 1 domains the slower of two concurrent tiers rules (NCCL pipelines them). A ring crosses every domain boundary once per channel, so
what the p cards of a domain carry is the flow of every other link; two domains exchange halves in a tree. Latency is a ring in lock step with its slowest
hop; an all_reduce may run on a tree of few steps and less bandwidth:

    t = base + 2 W.latency x steps + max( f S / (B frac),  g S / (p W frac_W) )      g = f; all_reduce on two domains (double tree): g = 1
    tree: base + 2 log2(N) W.latency + 2 p hop + max(..) / 0.62 (1 on two domains), whichever ends first

with W the network bandwidth per device. An all-to-all sends (n - p)/n of its bytes over the network from one card, the rest inside. Formulas: NCCL
tests' PERFORMANCE.md (bus bandwidth) and Hockney's alpha-beta model.
"""

from __future__ import annotations

from dataclasses import replace
from math import ceil, log2

from costmodel.hardware import Link, NodePool
from costmodel.mesh import Group
from costmodel.profiles.links import LinkProfile, link_profile

# (latency, share of bandwidth) of the protocols, one set for all devices: fitted with costmodel/profiles/links.py on 4,200 points of nine devices.
RING_PROTOCOLS = ((1.0, 0.05), (1.15, 0.55), (3.0, 1.0))
EXCHANGE_PROTOCOLS = ((1.0, 0.04), (1.6, 0.8), (3.2, 1.0))
_EXCHANGES = frozenset({"all_to_all", "p2p"})
# A ring step over the network waits for its data and for the credit that frees the buffer behind it.
RING_STEP = 2.0
# Bandwidth of a tree over a ring's: 187-191 of 280-310 GB/s on 4-64 hosts of eight B200 on NDR (public nccl-tests report).
TREE_FRAC = 0.62
_ROUNDS = frozenset({"all_gather", "reduce_scatter", "all_to_all"})


def collective_s(kind: str, full_bytes: float, group: Group, pool: NodePool, profile: LinkProfile | None = None) -> float:
    """Seconds of one `kind` over `full_bytes` (see costmodel.work.Collective) on `group` in `pool`; 0.0 for a group of one."""
    if group.size <= 1 or full_bytes <= 0.0:
        return 0.0
    profile = profile or link_profile(pool)
    local = min(group.per_fast_domain, group.size)
    outer = pool.network if group.size > group.per_node else pool.host_link
    if group.size <= local:
        return _inside_s(kind, full_bytes, group.size, _shared(pool.fast_link, group.size, pool.fast_domain), profile)
    if kind in ("p2p", "broadcast"):
        return profile.base_s + outer.latency_s + full_bytes / (outer.bandwidth_bytes_per_s * profile.network_frac)
    return _across_s(kind, full_bytes, group.size, local, pool.fast_link, outer, profile)


def volume_factor(kind: str, size: int) -> float:
    """Bytes over the slowest link per byte of the tensor."""
    if kind == "all_reduce":
        return 2.0 * (size - 1) / size
    if kind in ("p2p", "broadcast"):
        return 1.0
    return (size - 1) / size


def ring_steps(kind: str, size: int) -> int:
    """Steps of a ring of `size` ranks, rounds of an all-to-all."""
    if kind == "all_reduce":
        return 2 * (size - 1)
    return size - 1 if kind in _ROUNDS else 1


def _shared(link: Link, size: int, domain: int) -> Link:
    """The part of a direct mesh that `size` of its `domain` devices use: its bandwidth is the sum of a device's links, one to each neighbour."""
    if not link.kind.endswith("-mesh") or domain <= size:
        return link
    return replace(link, bandwidth_bytes_per_s=link.bandwidth_bytes_per_s * (size - 1) / (domain - 1))


def _inside_s(kind: str, full_bytes: float, size: int, link: Link, profile: LinkProfile) -> float:
    if link.kind == "loopback":  # gloo between the ranks of one host: a plain ring
        return ring_steps(kind, size) * link.latency_s + volume_factor(kind, size) * full_bytes / link.bandwidth_bytes_per_s
    wire = volume_factor(kind, size) * full_bytes / (link.bandwidth_bytes_per_s * profile.frac(kind, size))
    if kind in _EXCHANGES:
        alpha, protocols = profile.exchange_base_s + profile.exchange_hop_s * ring_steps(kind, size), EXCHANGE_PROTOCOLS
    else:
        alpha, protocols = profile.base_s + profile.hop_s * ring_steps(kind, size), RING_PROTOCOLS
    return min(latency * alpha + wire / share for latency, share in protocols)


def _across_s(kind: str, full_bytes: float, size: int, local: int, fast: Link, outer: Link, profile: LinkProfile) -> float:
    domains = ceil(size / local)
    bandwidth = outer.bandwidth_bytes_per_s * profile.network_frac
    inside_wire = 0.0
    if local > 1:
        share = (local - 1) / size if kind == "all_to_all" else volume_factor(kind, size)
        inside_wire = share * full_bytes / (fast.bandwidth_bytes_per_s * profile.frac(kind, local))
    if kind == "all_to_all":
        alpha = profile.base_s + outer.latency_s
        return alpha + max(inside_wire, full_bytes * (size - local) / size / bandwidth)
    factor = 1.0 if kind == "all_reduce" and domains == 2 else volume_factor(kind, size)
    wire = max(inside_wire, factor * full_bytes / (local * bandwidth))
    ring = RING_STEP * ring_steps(kind, size) * outer.latency_s + wire
    if kind != "all_reduce":
        return profile.base_s + ring
    tree = 2.0 * ceil(log2(domains)) * outer.latency_s + 2.0 * profile.hop_s * local
    return profile.base_s + min(ring, tree + (wire if domains == 2 else wire / TREE_FRAC))
