"""The tape of a block: everything the residency program needs to know, read off the kernels and exchanges of one rank.

A step is a forward kernel with the exchanges that always follow it (reductions, statistics). It reads tensors, some of them in a gathered form (`t@whole`,
`t@routed`, see planner.exchange): a gather of its own, which steps share and which a kept tensor spares where the engine keeps gathered forms. Seconds are
those of the cost model, alone on the device: forward kernels and their exchanges do not overlap with one another.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from costmodel.blocks import Machine, price_phase
from costmodel.engine import Engine
from costmodel.work import BlockWork
from planner.block_work import block_work, gathered
from planner.division import Division
from planner.emit import Emitter
from planner.exchange import Exchange, Item, base, exchanger
from planner.graph import Block
from planner.recompute import Policy, kept_inputs, needed_by_backward


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One forward kernel that may run again: `reads` are the physical names of activations it reads, `makes` the tensors it makes."""

    node_id: str
    kernel_s: float
    reads: tuple[str, ...]
    makes: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tape:
    """One block kind on one rank for one micro-batch.

    steps: forward kernels in order. backward_reads: physical names that backward reads. entering: inputs of the block that whoever reads later keeps alive.
    storable: made tensors that can be kept. size_bytes: bytes of a physical name. gather_s: seconds to make a gathered form from its tensor, in recompute and
    in backward (where it may hide behind a kernel, and is nothing extra when every choice pays it). shared: gathered forms that come with their tensor
    when it is kept, and that backward finds when recompute made them.
    """

    block: Block
    division: Division
    engine: Engine
    machine: Machine
    steps: tuple[Step, ...]
    backward_reads: tuple[str, ...]
    entering: tuple[str, ...]
    storable: tuple[str, ...]
    size_bytes: dict[str, float]
    gather_s: dict[str, tuple[float, float]]
    shared: frozenset[str]
    base_s: float
    _works: dict[Policy, BlockWork] = field(default_factory=dict, repr=False, compare=False)

    def work(self, policy: Policy) -> BlockWork:
        """The block's work under `policy`, as plans are priced."""
        if policy not in self._works:
            self._works[policy] = block_work(self.block, policy, self.division, self.engine)
        return self._works[policy]

    def extra_s(self, policy: Policy) -> float:
        """Seconds that recompute and backward take longer than the backward of a block that keeps everything."""
        work = self.work(policy)
        return price_phase((*work.recompute, *work.backward), self.machine).device_s - self.base_s


def record(block: Block, division: Division, engine: Engine, machine: Machine) -> Tape:
    """The tape of a prepared block (planner.block_work.prepare)."""
    tensors = {tensor.tensor_id: tensor for tensor in block.tensors}
    emitter = Emitter(division=division, engine=engine, tensors=tensors)
    inserter = exchanger(block, division, engine)
    phases = {phase: tuple(node for node in block.nodes if node.phase == phase) for phase in ("forward", "backward")}
    exchanges = [item for items in phases.values() for item in inserter.insert(items) if isinstance(item, Exchange)]
    gathers = {name: item for item in exchanges for name in item.outputs if base(name) in item.inputs}

    def counts(name: str) -> bool:
        return tensors[base(name)].kind in ("activation", "input")

    def seconds(items: tuple[Item, ...]) -> float:
        return price_phase(emitter.works(items), machine).device_s

    steps = []
    for node in phases["forward"]:
        items = inserter.insert((node,), frozenset(gathers))
        kernel = next(item for item in items if not isinstance(item, Exchange))
        reads = tuple(name for name in kernel.inputs if counts(name))
        steps.append(Step(node_id=node.node_id, kernel_s=seconds(items), reads=reads, makes=node.outputs))
    lean = inserter.insert(phases["backward"], frozenset(gathers))
    made = {name for node in phases["backward"] for name in node.outputs}
    read_later = dict.fromkeys(name for item in lean for name in item.inputs if base(name) not in made and counts(name))
    forward_made = {name: node for node in phases["forward"] for name in node.outputs}
    entering = kept_inputs(block)
    own = [name for name in read_later if base(name) in forward_made or base(name) in entering]
    deferred = inserter.deferred
    storable = tuple(name for name in forward_made if name not in deferred and counts(name))
    later = {base(name) for name in own} | {base(name) for step in steps for name in step.reads} | needed_by_backward(block)
    shared = gathered(inserter.insert(phases["forward"]), engine)
    whole = seconds(inserter.insert(phases["backward"]))

    def backward_s(name: str) -> float:
        """Seconds that gathering in backward takes, where something can spare it."""
        return max(0.0, whole - seconds(inserter.insert(phases["backward"], frozenset({name})))) if name in shared else 0.0

    gather_s = {
        name: (seconds((item,)), backward_s(name)) for name, item in gathers.items() if base(name) in forward_made or base(name) in block.inputs
    }  # fmt: skip
    none = block_work(block, "none", division, engine)
    names = {*storable, *entering, *gather_s}
    return Tape(
        block=block, division=division, engine=engine, machine=machine, steps=tuple(steps), backward_reads=tuple(own), entering=entering,
        storable=tuple(name for name in storable if name in later), size_bytes={name: emitter.size(name) for name in sorted(names)}, gather_s=gather_s,
        shared=shared & set(gather_s),
        base_s=price_phase((*none.recompute, *none.backward), machine).device_s,
    )  # fmt: skip
