"""Price one `BlockWork` on two streams: what computes, what communicates, and what of the latter no compute hides.

Works run in program order. Compute occupies the compute stream; a blocking collective makes both streams meet; an overlapping one occupies the communication
stream beside the compute that follows it, up to the next blocking call or `wait`. At the end of a phase both streams meet again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from costmodel.collectives import collective_s, ring_steps
from costmodel.compute import compute_s, least_s
from costmodel.engine import Engine
from costmodel.hardware import Device, NodePool
from costmodel.mesh import Group, Mesh
from costmodel.profiles.kernels import KernelProfile, kernel_profile
from costmodel.profiles.links import LinkProfile, link_profile
from costmodel.work import BlockWork, Collective, Compute, Work

Amounts = tuple[tuple[str, float], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """Seconds of one phase (or of many): device compute by op class, exposed communication by axis, what overlap hid, exposed copies; kernels; flops.

    stall_s: what the tensor-parallel collectives take at least where the engine stalls in pipelines over the network (Engine.pipeline_step_s).
    """

    compute: Amounts = ()
    exposed: Amounts = ()
    hidden_s: float = 0.0
    copy_s: float = 0.0
    num_kernels: int = 0
    flops: float = 0.0
    stall_s: float = 0.0

    @property
    def compute_s(self) -> float:
        """Device compute."""
        return sum(seconds for _, seconds in self.compute)

    @property
    def exposed_s(self) -> float:
        """Exposed communication."""
        return sum(seconds for _, seconds in self.exposed)

    @property
    def device_s(self) -> float:
        """Compute, exposed communication and exposed copies."""
        return self.compute_s + self.exposed_s + self.copy_s


def total_phase(parts: Iterable[tuple[Phase, int]]) -> Phase:
    """The sum of `times` x phase over (phase, times)."""
    compute: dict[str, float] = {}
    exposed: dict[str, float] = {}
    hidden = copy = flops = stall = 0.0
    kernels = 0
    for phase, times in parts:
        for mine, theirs in ((compute, phase.compute), (exposed, phase.exposed)):
            for name, seconds in theirs:
                mine[name] = mine.get(name, 0.0) + seconds * times
        hidden += phase.hidden_s * times
        copy += phase.copy_s * times
        kernels += phase.num_kernels * times
        flops += phase.flops * times
        stall += phase.stall_s * times
    return Phase(
        compute=tuple(compute.items()), exposed=tuple(exposed.items()), hidden_s=hidden, copy_s=copy, num_kernels=kernels, flops=flops,
        stall_s=stall,
    )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What prices work: one pool, its calibrated rows, the mesh laid on it."""

    pool: NodePool
    mesh: Mesh
    kernels: KernelProfile
    links: LinkProfile
    stall_call_s: float = 0.0
    stall_step_s: float = 0.0
    _groups: dict[str, Group] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def of(cls, pool: NodePool, mesh: Mesh, engine: Engine | None = None) -> Machine:
        """The machine of `pool` under `mesh`: with the kernels and habits of `engine`, or at its best without one."""
        kernels, links = kernel_profile(pool.device), link_profile(pool)
        if engine is None:
            return cls(pool=pool, mesh=mesh, kernels=kernels, links=links)
        kernels = kernels.with_attention(engine.attention_kernel)
        stages = mesh.group("pp", fast_domain=pool.fast_domain, per_node=pool.devices_per_node)
        stalls = float(stages.per_node < stages.size)
        return cls(
            pool=pool, mesh=mesh, kernels=kernels, links=links, stall_call_s=stalls * engine.pipeline_call_s, stall_step_s=stalls * engine.pipeline_step_s
        )  # fmt: skip

    def collective_s(self, kind: str, full_bytes: float, axis: str) -> float:
        """Seconds of a collective on the group of `axis`."""
        group = self._groups.get(axis)
        if group is None:
            group = self._groups[axis] = self.mesh.group(axis, fast_domain=self.pool.fast_domain, per_node=self.pool.devices_per_node)
        return collective_s(kind, full_bytes, group, self.pool, self.links)

    def copy_s(self, num_bytes: float, direction: str) -> float:
        """Seconds of a host or storage transfer."""
        pool = self.pool
        share = max(1, pool.devices_per_node)
        rates = {"disk_write": pool.storage_write_bytes_per_s / share, "disk_read": pool.storage_read_bytes_per_s / share}
        rate = rates.get(direction) or pool.host_link.bandwidth_bytes_per_s
        return pool.host_link.latency_s + num_bytes / rate


KernelSeconds = Callable[[Compute, Device, KernelProfile], float]


def price_phase(works: tuple[Work, ...], machine: Machine, kernel_s: KernelSeconds = compute_s) -> Phase:
    """Seconds of `works` in order on the two streams; `kernel_s` times a kernel."""
    computed: dict[str, float] = {}
    exposed: dict[str, float] = {}
    clock = channel = busy = copy = flops = stall = 0.0
    kernels, axis = 0, ""
    for work in works:
        if isinstance(work, Compute):
            seconds = kernel_s(work, machine.pool.device, machine.kernels)
            computed[work.op_class] = computed.get(work.op_class, 0.0) + seconds
            kernels += work.num_kernels
            flops += work.flops
            clock += seconds
        elif isinstance(work, Collective):
            seconds = machine.collective_s(work.kind, work.full_bytes, work.axis)
            if seconds > 0.0:
                kernels += 1
                busy += seconds
                if work.axis == "tp":
                    stall += machine.stall_call_s + machine.stall_step_s * ring_steps(work.kind, machine.mesh.tp)
                channel = max(clock, channel) + seconds
                axis = work.axis
            if not work.overlaps and channel > clock:
                exposed[work.axis] = exposed.get(work.axis, 0.0) + channel - clock
                clock = channel
        elif not work.overlaps:
            seconds = machine.copy_s(work.num_bytes, work.direction)
            copy += seconds
            clock += seconds
    if channel > clock:
        exposed[axis] = exposed.get(axis, 0.0) + channel - clock
    hidden = max(0.0, busy - sum(exposed.values()))
    return Phase(
        compute=tuple(computed.items()), exposed=tuple(exposed.items()), hidden_s=hidden, copy_s=copy, num_kernels=kernels, flops=flops,
        stall_s=stall,
    )  # fmt: skip


def price_block(block: BlockWork, machine: Machine) -> tuple[Phase, Phase]:
    """Forward, and backward with the recompute before it."""
    return price_phase(block.forward, machine), price_phase((*block.recompute, *block.backward), machine)


def least_block_s(block: BlockWork, machine: Machine) -> float:
    """Forward and backward with every kernel at the speed of an endless one (costmodel.compute.least_s).

    Of a block with endless rows it is the least that a row takes under the same division: kernels and collectives never get faster a row when there are fewer.
    """
    return sum(price_phase(works, machine, least_s).device_s for works in (block.forward, (*block.recompute, *block.backward)))


def price_halves(block: BlockWork, machine: Machine) -> tuple[Phase, Phase]:
    """Backward in two halves: gradients of the input, with the recompute before them, and gradients of the weights. A block without halves is all first."""
    if not block.input_gradient and not block.weight_gradient:
        return price_block(block, machine)[1], Phase()
    return price_phase((*block.recompute, *block.input_gradient), machine), price_phase(block.weight_gradient, machine)
