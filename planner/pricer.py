"""The pricer of real problems: bounds from lowered blocks, estimates from planner.pricing. One object a search; its caches live and die with it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import product

from costmodel.blocks import Machine, least_block_s, price_block
from costmodel.estimate import Estimate, StageMemory
from costmodel.memory import stage_memories, usable_bytes
from costmodel.mesh import Mesh
from costmodel.schedule import Orders, actions, fewest, peak_in_flight, rules
from costmodel.schedules.busy import busy_s
from costmodel.simulate import COMPILED_LAUNCH_FRAC, least_step_s
from costmodel.work import BlockWork, StepWork
from planner.bounds import split_bound_s, states_bytes
from planner.division import Division
from planner.lower import LoweringCache, division_of, lower, lower_block
from planner.outcome import CLOSE, TIGHT, Need
from planner.pricing import estimate_graph
from planner.problem import Problem
from planner.space import Branch
from planner.strategy import Strategy
from planner.validity import validate

STATES = "parameters, gradients and optimizer states alone do not fit"
SAVED = "parameters, gradients, optimizer states and saved activations alone do not fit"


@dataclass(frozen=True, slots=True, kw_only=True)
class Lowered:
    """A lowered step with its least seconds."""

    step: StepWork
    least_s: float


class GraphPricer:
    """Prices strategies of one problem (planner.outcome.Pricer)."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.usable_bytes = (1.0 - problem.headroom_frac) * usable_bytes(problem.cluster.pool)
        self.cache = LoweringCache()
        self._endless: dict[object, float] = {}
        self._blocks: dict[int, tuple[BlockWork, tuple[tuple[float, int], tuple[float, int]]]] = {}
        self._totals: dict[Division, float] = {}
        self._steps: dict[tuple[object, ...], Lowered] = {}
        self._orders: dict[tuple[str, int, int, int], Orders] = {}

    def least_states_bytes(self, mesh: Mesh, zero_stage: int) -> Need:
        """Parameters, gradients and optimizer states."""
        problem = self.problem
        return Need(peak_bytes=states_bytes(problem.graph, problem.job, problem.engine, mesh, zero_stage), reason=STATES)

    def least_branch_s(self, branch: Branch, level: int) -> float:
        """The pipeline's least bubble around the blocks of the cheapest technique.

        First unsplit kernels at their best over all devices; CLOSE, kernels and collectives of this mesh at endless sizes; TIGHT, at their real sizes.
        """
        mesh, micro_batches = branch.mesh, self.problem.job.global_batch // (branch.mesh.dp * branch.micro_batch)
        if level < CLOSE:
            total_s = self._ideal_s(branch) * mesh.pp / micro_batches
        else:
            bound = self._total_s if level == TIGHT else self._endless_s
            total_s = min(bound(strategy) for strategy in self._techniques(branch))
        interleaved = any(vpp > 1 or rules(name).splits_backward for name, vpp in branch.options.schedules)
        return split_bound_s(total_s, micro_batches, mesh.pp, interleaved=interleaved)

    def least_s(self, strategy: Strategy) -> float:
        """busy_s of the lowered chunks."""
        return self._lowered(strategy).least_s

    def sharp_s(self, strategy: Strategy) -> float:
        """costmodel.simulate.least_step_s."""
        step = replace(self._lowered(strategy).step, mesh=strategy.mesh, zero_stage=strategy.zero_stage)
        return least_step_s(step, self.problem.cluster, self.problem.engine)

    def least_bytes(self, strategy: Strategy, limit_bytes: float) -> Need:
        """The peak under the first few micro-batches; later ones repeat them.

        What exceeds the limit is found as early as possible: by its states, by what the first rank (most micro-batches in flight) saves, there, anywhere.
        """
        states = self.least_states_bytes(strategy.mesh, strategy.zero_stage)
        if states.peak_bytes > limit_bytes:
            return states
        lowered = self._lowered(strategy)
        saved_bytes = self._saved_bytes(lowered.step)
        if states.peak_bytes + saved_bytes > limit_bytes:
            return Need(peak_bytes=states.peak_bytes + saved_bytes, reason=SAVED)
        step = replace(lowered.step, mesh=strategy.mesh, zero_stage=strategy.zero_stage)
        orders = self._first_actions(step)
        fullest = self._fullest(step, orders[:1])
        if len(orders) > 1 and fullest.peak_bytes <= limit_bytes:
            fullest = self._fullest(step, orders)
        largest = max(fullest.classes, key=lambda line: line.amount).name.replace("_", " ")
        return Need(peak_bytes=fullest.peak_bytes, reason=f"the peak does not fit, {largest} most of it")

    def estimate(self, strategy: Strategy) -> Estimate:
        """planner.pricing.estimate_graph with this pricer's cache."""
        problem = self.problem
        return estimate_graph(problem.graph, problem.cluster, problem.job, strategy, problem.engine, self.cache)

    def _lowered(self, strategy: Strategy) -> Lowered:
        """Lowering does not see how data parallelism is split and sharded, so strategies that differ in that alone share it."""
        problem, mesh = self.problem, strategy.mesh
        key = (mesh.pp, mesh.dp, mesh.cp, mesh.tp, mesh.ep, strategy.micro_batch, strategy.sequence_parallel, strategy.schedule, strategy.vpp,
               strategy.recompute, strategy.recompute_layers, strategy.cp_kind, strategy.flash_attention, strategy.compile)  # fmt: skip
        found = self._steps.get(key)
        if found is None:
            validate(problem.graph, problem.cluster, problem.job, strategy, problem.engine)
            step = lower(problem.graph, problem.job, strategy, problem.engine, self.cache)
            machine = Machine.of(problem.cluster.pool, mesh)
            distinct = {id(stage.blocks): stage.blocks for stage in step.stages}
            seconds = {key: self._chunk_s(blocks, machine, compiled=step.compiled) for key, blocks in distinct.items()}
            chunks = [(stage.rank_index, seconds[id(stage.blocks)]) for stage in step.stages]
            found = self._steps[key] = Lowered(
                step=step,
                least_s=busy_s(chunks, step.num_micro_batches, (0.0,) * mesh.pp, fills=not rules(step.schedule).splits_backward),
            )
        return found

    def _saved_bytes(self, step: StepWork) -> float:
        """What the first rank keeps for backward at most."""
        first = {
            stage.stage_index: sum(block.saved_bytes * repeat for block, repeat in stage.blocks)
            for stage in step.stages
            if stage.rank_index == 0
        }
        return peak_in_flight(self._first_actions(step)[0], first)[0]

    def _fullest(self, step: StepWork, orders: Orders) -> StageMemory:
        memories = stage_memories(step, self.problem.engine, self.problem.cluster.pool, orders)
        return max(memories, key=lambda stage: stage.peak_bytes)

    def _first_actions(self, step: StepWork) -> Orders:
        schedule, pp = step.schedule if step.mesh.pp > 1 else "none", step.mesh.pp
        enough = fewest(schedule, pp=pp, num_micro_batches=step.num_micro_batches)
        key = (schedule, pp, step.vpp, enough)
        if key not in self._orders:
            self._orders[key] = actions(schedule, pp=pp, vpp=step.vpp, num_micro_batches=enough)
        return self._orders[key]

    def _chunk_s(self, blocks: Iterable[tuple[BlockWork, int]], machine: Machine, *, compiled: bool) -> float:
        """One micro-batch forward and backward: the device's seconds, or the host's when it dispatches slower (costmodel.simulate)."""
        launch_s = self.problem.engine.launch_s * (COMPILED_LAUNCH_FRAC if compiled else 1.0)
        device = [0.0, 0.0]
        host = [0.0, 0.0]
        for block, repeat in blocks:
            for i, (seconds, kernels) in enumerate(self._phases(block, machine)):
                device[i] += repeat * seconds
                host[i] += repeat * kernels * launch_s
        serial = machine.pool.device.kind == "cpu"
        return sum(mine + theirs if serial else max(mine, theirs) for mine, theirs in zip(device, host, strict=True))

    def _phases(self, block: BlockWork, machine: Machine) -> tuple[tuple[float, int], tuple[float, int]]:
        """(seconds, kernels) forward and backward. They depend on the block and the mesh axes it was lowered for, so the block object is
        the key (kept here, so that its id stays its own)."""
        found = self._blocks.get(id(block))
        if found is None:
            forward, backward = price_block(block, machine)
            found = (block, ((forward.device_s, forward.num_kernels), (backward.device_s, backward.num_kernels)))
            self._blocks[id(block)] = found
        return found[1]

    def _ideal_s(self, branch: Branch) -> float:
        """The whole global batch, unsplit, over all devices: however kernels are divided, none runs faster."""
        problem = self.problem
        whole = Strategy(
            mesh=Mesh(), micro_batch=problem.job.global_batch, flash_attention=branch.flash_attention, compile=branch.compile
        )  # fmt: skip
        return self._endless_s(whole) / problem.cluster.num_devices

    def _endless_s(self, strategy: Strategy) -> float:
        """The strategy's micro-batch through all layers at the speed of endless sizes (costmodel.blocks.least_block_s): its share of the whole global batch."""
        batch = self.problem.job.global_batch
        endless = replace(strategy, micro_batch=batch)
        key = (division_of(self.problem.graph, self.problem.job, endless), strategy.flash_attention, strategy.compile)
        if key not in self._endless:
            machine = Machine.of(self.problem.cluster.pool, strategy.mesh)
            self._endless[key] = sum(repeat * least_block_s(block, machine) for block, repeat in self._blocks_of(endless)) / batch
        return self._endless[key] * strategy.micro_batch

    def _techniques(self, branch: Branch) -> Iterator[Strategy]:
        """A strategy of the branch for each technique that changes a block."""
        first = next(branch.strategies())
        for parallel, kind in product(branch.options.sequence_parallel, branch.options.cp_kinds):
            yield replace(first, sequence_parallel=parallel, cp_kind=kind)

    def _blocks_of(self, strategy: Strategy) -> list[tuple[BlockWork, int]]:
        """Every kind of block under `strategy` without recompute, and how often it runs."""
        problem, graph, cache = self.problem, self.problem.graph, self.cache.of(self.problem.graph)
        division = division_of(graph, problem.job, strategy)
        counts = Counter(layer.kind_id for layer in graph.layers)
        return [
            (lower_block(block, "none", division, problem.job, strategy, problem.engine, cache), counts[block.kind_id])
            for block in graph.kinds
        ]

    def _total_s(self, strategy: Strategy) -> float:
        """One micro-batch through all layers, without recompute, pipeline or ZeRO."""
        division = division_of(self.problem.graph, self.problem.job, strategy)
        found = self._totals.get(division)
        if found is None:
            machine = Machine.of(self.problem.cluster.pool, strategy.mesh)
            found = self._totals[division] = self._chunk_s(self._blocks_of(strategy), machine, compiled=strategy.compile)
        return found
