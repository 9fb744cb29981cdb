"""The space of strategies: every mesh the cluster, the model and the engine allow, and every technique that goes with it.

Two levels, so that a bound on a branch prunes all of its members at once:

    branches()    pp x dp x cp x tp x ep x micro-batch: any divisors, not only powers of two
    Branch.strategies()   x replicas and shards of dp x ZeRO stage x schedule and chunks x sequence parallel x recompute x context-parallel kind

A generator yields what can run or `Rejected(what, reason)`; nothing is dropped in silence. Choices that are the same program under two names appear once:
ZeRO 0 spells data parallelism dp_replicate (dp_shard only where experts fold into it), ZeRO >= 1 needs ranks to shard over; schedule is "none" without a
pipeline; sequence_parallel is false without tp; first_k stops short of what "full" says.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import product

from costmodel.engine import Engine
from costmodel.errors import InputError
from costmodel.hardware import Cluster
from costmodel.mesh import Mesh
from costmodel.schedule import problem, rules
from planner.graph import TENSOR_PARALLEL_AXES, Graph
from planner.job import Job
from planner.module_limits import pipeline_obstacle, sequence_obstacle, tensor_obstacle
from planner.restrict import Restrictions
from planner.strategy import CP_KINDS, Strategy

# Schedules with their chunks per rank, and beside each its recompute choices.
Scheduled = tuple[tuple[tuple[str, int], ...], tuple[tuple[tuple[str, int], ...], ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejected:
    """Something that cannot run: what it is and the reason, equal for all that share it. `count` is how many strategies it stands for."""

    what: str
    reason: str
    count: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Extents:
    """What the space needs to know about a model: layers to cut between, and the extents that tp and ep must divide.

    tp_extents: (logical axis, extent) of everything tensor parallelism must split evenly (kv_heads may also be copied, except by engines that cut modules).
    *_obstacle: why engines that train the user's own module cannot split it so (planner.module_limits), "" when they can.
    """

    num_layers: int
    num_experts: int
    tp_extents: tuple[tuple[str, int], ...]
    tensor_obstacle: str = ""
    sequence_obstacle: str = ""
    pipeline_obstacle: str = ""

    @classmethod
    def of(cls, graph: Graph) -> Extents:
        """The extents of `graph`."""
        found: dict[tuple[str, int], None] = {}
        for block in graph.kinds:
            for node in block.nodes:
                for loop in node.loops:
                    if loop.axis in TENSOR_PARALLEL_AXES:
                        found[(loop.axis, loop.size)] = None
        for axis, size in (("heads", graph.num_heads), ("kv_heads", graph.num_kv_heads)):
            if size:
                found[(axis, size)] = None
        return cls(
            num_layers=graph.num_layers, num_experts=graph.num_experts, tp_extents=tuple(sorted(found)), tensor_obstacle=tensor_obstacle(graph),
            sequence_obstacle=sequence_obstacle(graph), pipeline_obstacle=pipeline_obstacle(graph),
        )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The technique choices of one branch, each a tuple of values; the branch's strategies are their product (recompute depends on the schedule).

    shardings: how dp splits into replicas and shards, with a ZeRO stage for each, from few shards to many.
    """

    shardings: tuple[tuple[Mesh, int], ...]
    schedules: tuple[tuple[str, int], ...]
    recompute: tuple[tuple[tuple[str, int], ...], ...]
    sequence_parallel: tuple[bool, ...]
    cp_kinds: tuple[str, ...]

    @property
    def count(self) -> int:
        """How many strategies the product has."""
        return len(self.shardings) * len(self.sequence_parallel) * len(self.cp_kinds) * sum(map(len, self.recompute))


@dataclass(frozen=True, slots=True, kw_only=True)
class Chain:
    """Strategies that differ in recompute, in growing order: none, first 1, 2, ... layers, full; "selective" is a chain of its own.

    They stand for each of `meshes`, which differ in how dp splits into replicas and shards. Along a chain a step never gets shorter, and from the second member
    on memory never grows, so on each mesh the first member that fits is the best. `base` has the last mesh, with the most shards: what does not fit there
    fits on none.
    """

    base: Strategy
    recompute: tuple[tuple[str, int], ...]
    meshes: tuple[Mesh, ...]

    @property
    def count(self) -> int:
        """How many members it has on one mesh."""
        return len(self.recompute)

    @property
    def size(self) -> int:
        """How many strategies it stands for."""
        return len(self.recompute) * len(self.meshes)

    def member(self, index: int) -> Strategy:
        """One member on the last mesh; index -1 is the last."""
        name, layers = self.recompute[index]
        return replace(self.base, recompute=name, recompute_layers=layers)

    def part(self, start: int, stop: int | None = None) -> Chain:
        """The members from `start` up to `stop`."""
        return replace(self, recompute=self.recompute[start:stop])

    def split(self) -> Iterator[Chain]:
        """A chain for each mesh."""
        for mesh in self.meshes:
            yield replace(self, base=replace(self.base, mesh=mesh), meshes=(mesh,))


@dataclass(frozen=True, slots=True, kw_only=True)
class Branch:
    """The sizes of the mesh axes and a micro-batch with its `options`; `flash_attention` and `compile` are the user's."""

    micro_batch: int
    options: Options
    flash_attention: bool = True
    compile: bool = False

    @property
    def mesh(self) -> Mesh:
        """The mesh with the most shards."""
        return self.options.shardings[-1][0]

    @property
    def zero_stage(self) -> int:
        """The highest ZeRO stage of any member."""
        return max(stage for _, stage in self.options.shardings)

    def meshes_by_stage(self) -> Iterator[tuple[int, tuple[Mesh, ...]]]:
        """Each ZeRO stage with its meshes, from few shards to many."""
        for stage in sorted({stage for _, stage in self.options.shardings}):
            yield stage, tuple(mesh for mesh, other in self.options.shardings if other == stage)

    def strategies(self) -> Iterator[Strategy]:
        """All members, in a fixed order."""
        for chain in self.chains():
            for single in chain.split():
                yield from map(single.member, range(single.count))

    def chains(self) -> Iterator[Chain]:
        """All members, chained by recompute."""
        options = self.options
        for (schedule, vpp), recomputes in zip(options.schedules, options.recompute, strict=True):
            links = [tuple(item for item in recomputes if (item[0] == "selective") == alone) for alone in (False, True)]
            for (zero, meshes), parallel, kind, link in product(
                self.meshes_by_stage(), options.sequence_parallel, options.cp_kinds, filter(None, links)
            ):
                base = Strategy(
                    mesh=meshes[-1],
                    micro_batch=self.micro_batch,
                    zero_stage=zero,
                    sequence_parallel=parallel,
                    schedule=schedule,
                    vpp=vpp,
                    cp_kind=kind,
                    flash_attention=self.flash_attention,
                    compile=self.compile,
                )
                yield Chain(base=base, recompute=link, meshes=meshes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """Everything that spans the space. `branches` enumerates it."""

    extents: Extents
    cluster: Cluster
    job: Job
    engine: Engine
    restrictions: Restrictions = field(default_factory=Restrictions)

    def notes(self) -> tuple[str, ...]:
        """What the space leaves out unless it is asked for: a proof is about the rest."""
        domain = self.cluster.pool.fast_domain
        if self.restrictions.mentions("tp") or self.cluster.num_devices <= domain:
            return ()
        return (f"searched with tp <= {domain}: tensor parallelism stays inside the fast domain (fix tp to search beyond)",)

    def branches(self) -> Iterator[Branch | Rejected]:
        """All branches that can run, and the meshes that cannot with their reasons, in a fixed order."""
        known: dict[tuple[int, int], Scheduled] = {}
        for shardings in self.meshes():
            if isinstance(shardings, Rejected):
                yield shardings
                continue
            mesh = shardings[-1][0]
            for micro_batch in divisors(self.job.global_batch // mesh.dp):
                if self.restrictions.allows("micro_batch", micro_batch):
                    yield self._branch(shardings, micro_batch, known)

    def meshes(self) -> Iterator[tuple[tuple[Mesh, int], ...] | Rejected]:
        """The shardings (see Options) of every pp x dp x cp x tp over all devices, with every ep that folds into them."""
        devices, allows = self.cluster.num_devices, self.restrictions.allows
        for tp in filter(lambda size: allows("tp", size), divisors(devices)):
            if reason := self._tp_reason(tp):
                yield Rejected(what=f"tp {tp}: {reason[1]}", reason=reason[0])
                continue
            for pp in filter(lambda size: allows("pp", size), divisors(devices // tp)):
                if reason := self._pp_reason(pp):
                    yield Rejected(what=f"pp {pp}: {reason[1]}", reason=reason[0])
                    continue
                for cp in filter(lambda size: allows("cp", size), divisors(devices // (tp * pp))):
                    if reason := self._cp_reason(cp, tp):
                        yield Rejected(what=f"cp {cp}, tp {tp}: {reason[1]}", reason=reason[0])
                        continue
                    yield from self._data_parallel(devices // (tp * pp * cp), pp=pp, cp=cp, tp=tp)

    def _pp_reason(self, pp: int) -> tuple[str, str] | None:
        if pp > self.extents.num_layers:
            return "more pipeline stages than layers", f"the model has {self.extents.num_layers} layers"
        if pp > 1 and self.engine.splits_modules and self.extents.pipeline_obstacle:
            return f"engine {self.engine.name} cannot cut this model into stages", self.extents.pipeline_obstacle
        return None

    def _tp_reason(self, tp: int) -> tuple[str, str] | None:
        domain = self.cluster.pool.fast_domain
        if tp > domain and not self.restrictions.mentions("tp"):
            return "tensor parallel would leave the fast domain", f"the fast domain has {domain} devices (fix tp to ask for it)"
        own = self.engine.splits_modules
        if own and tp > 1 and self.extents.tensor_obstacle:
            return f"engine {self.engine.name} cannot split this model's modules over tensor parallel", self.extents.tensor_obstacle
        for axis, size in self.extents.tp_extents:
            if size % tp and not (axis == "kv_heads" and tp % size == 0 and not own):
                return f"tensor parallel does not divide the model's {axis}", f"{size} {axis} do not split into {tp}"
        return None

    def _cp_reason(self, cp: int, tp: int) -> tuple[str, str] | None:
        if cp == 1:
            return None
        if not self.engine.supports_cp:
            return f"engine {self.engine.name} has no context parallelism", "use another engine"
        if self.job.seq_len % (2 * cp * tp):
            return (
                "the sequence does not divide over context parallel",
                f"{self.job.seq_len} is not a multiple of 2 x cp x tp = {2 * cp * tp}",
            )
        return None

    def _data_parallel(self, dp: int, *, pp: int, cp: int, tp: int) -> Iterator[tuple[tuple[Mesh, int], ...] | Rejected]:
        if not self.restrictions.allows("dp", dp):
            return
        if self.job.global_batch % dp:
            what = f"{describe_mesh(Mesh(pp=pp, dp_shard=dp, cp=cp, tp=tp))}: global batch {self.job.global_batch} is not a multiple of dp {dp}"
            yield Rejected(what=what, reason="the global batch does not divide over the data-parallel ranks")
            return
        for ep in self._expert_parallel(dp * cp * tp):
            if isinstance(ep, Rejected):
                yield ep
                continue
            splits = [shard for shard in divisors(dp) if (shard * cp * tp) % ep == 0 and self._allows_split(dp // shard, shard)]
            meshes = [Mesh(pp=pp, dp_replicate=dp // shard, dp_shard=shard, cp=cp, tp=tp, ep=ep) for shard in splits]
            shardings = tuple((mesh, stage) for mesh in meshes for stage in self._zero_stages(mesh))
            if shardings:
                yield shardings

    def _allows_split(self, replicate: int, shard: int) -> bool:
        return self.restrictions.allows("dp_replicate", replicate) and self.restrictions.allows("dp_shard", shard)

    def _expert_parallel(self, folded: int) -> Iterator[int | Rejected]:
        experts = self.extents.num_experts
        for ep in divisors(folded):
            if not self.restrictions.allows("ep", ep) or (ep > 1 and not experts):
                continue
            if ep > 1 and not self.engine.supports_ep:
                yield Rejected(what=f"ep {ep}", reason=f"engine {self.engine.name} has no expert parallelism")
            elif experts and experts % ep:
                yield Rejected(what=f"ep {ep}: {experts} experts", reason="expert parallel does not divide the experts")
            else:
                yield ep

    def _zero_stages(self, mesh: Mesh) -> tuple[int, ...]:
        def meaningful(stage: int) -> bool:
            if stage == 0:
                return mesh.dp_shard == 1 or (mesh.ep > mesh.cp * mesh.tp and mesh.dp_replicate == 1)
            return mesh.dp_shard * mesh.cp > 1

        return tuple(stage for stage in self.engine.zero_stages if meaningful(stage) and self.restrictions.allows("zero_stage", stage))

    def _branch(
        self, shardings: tuple[tuple[Mesh, int], ...], micro_batch: int, known: dict[tuple[int, int], Scheduled]
    ) -> Branch | Rejected:
        allows, mesh = self.restrictions.allows, shardings[-1][0]
        num_micro_batches = self.job.global_batch // (mesh.dp * micro_batch)
        scheduled = known.get((mesh.pp, num_micro_batches))
        if scheduled is None:
            schedules = tuple(self._schedules(mesh.pp, num_micro_batches))
            scheduled = schedules, tuple(tuple(self._recompute(name, mesh.pp * vpp)) for name, vpp in schedules)
            known[mesh.pp, num_micro_batches] = scheduled
        options = Options(
            shardings=shardings,
            schedules=scheduled[0],
            recompute=scheduled[1],
            sequence_parallel=tuple(self._sequence_parallel(mesh)),
            cp_kinds=tuple(kind for kind in CP_KINDS[: 2 if self._all_to_all_fits(mesh) else 1] if mesh.cp == 1 or allows("cp_kind", kind)),
        )
        if not options.count or not allows("num_micro_batches", num_micro_batches):
            what = f"{describe_mesh(mesh)}, micro-batch {micro_batch} x {num_micro_batches}"
            reason = (
                "the restrictions leave no schedule or technique" if self.restrictions.items else "no schedule runs so few micro-batches"
            )
            return Rejected(what=what, reason=reason)
        flash, compiled = self.restrictions.values("flash_attention"), self.restrictions.values("compile")
        return Branch(
            micro_batch=micro_batch,
            options=options,
            flash_attention=bool(flash[0]) if flash else True,
            compile=bool(compiled[0]) if compiled else False,
        )

    def _sequence_parallel(self, mesh: Mesh) -> Iterator[bool]:
        if mesh.tp == 1:
            yield False
            return
        even = self.job.seq_len % (mesh.cp * mesh.tp) == 0 and not (self.engine.splits_modules and self.extents.sequence_obstacle)
        values = (True,) if mesh.ep > 1 else (True, False)
        yield from (value for value in values if (even or not value) and self.restrictions.allows("sequence_parallel", value))

    def _all_to_all_fits(self, mesh: Mesh) -> bool:
        heads = [size for axis, size in self.extents.tp_extents if axis in ("heads", "kv_heads")]
        return mesh.cp > 1 and all(size % (mesh.cp * mesh.tp) == 0 for size in heads)

    def _schedules(self, pp: int, num_micro_batches: int) -> Iterator[tuple[str, int]]:
        """Schedules with their chunks per rank, where they can run (costmodel.schedule.problem); torch's 1F1B needs a micro-batch per stage."""
        allows = self.restrictions.allows
        for name, vpp in self._all_schedules(pp):
            refused = problem(name, pp=pp, vpp=vpp, num_micro_batches=num_micro_batches)
            enough = refused is None and (name != "1f1b" or num_micro_batches >= pp)
            even = self.engine.supports_uneven_stages or self.extents.num_layers % (pp * vpp) == 0
            compiled = self.restrictions.values("compile")[:1] == (True,) and self.engine.pipeline_buffers and rules(name).splits_backward
            if enough and even and not compiled and allows("schedule", name) and allows("vpp", vpp):
                yield name, vpp

    def _all_schedules(self, pp: int) -> Iterator[tuple[str, int]]:
        if pp == 1:
            yield "none", 1
            return
        for name in self.engine.schedules:
            fewest, most = rules(name).chunks
            chunk_sizes = set()
            for vpp in range(fewest, min(most, self.extents.num_layers // pp) + 1):
                size = -(-self.extents.num_layers // (pp * vpp))
                if size not in chunk_sizes:
                    chunk_sizes.add(size)
                    yield name, vpp

    def _recompute(self, schedule: str, num_chunks: int) -> Iterator[tuple[str, int]]:
        """(recompute, recompute_layers) in order of growing recompute; first_k stays below what "full" says.

        None with a split backward of torch pipelining, which would recompute once for every group of weights (planner.validity).
        """
        allows = self.restrictions.allows
        none_only = self.engine.pipeline_buffers and rules(schedule).splits_backward
        for name in ("none",) if none_only else ("none", "selective", "first_k", "full"):
            if name not in self.engine.recompute or not allows("recompute", name):
                continue
            counts = range(1, -(-self.extents.num_layers // num_chunks)) if name == "first_k" else (0,)
            yield from ((name, count) for count in counts if allows("recompute_layers", count))


def divisors(number: int) -> tuple[int, ...]:
    """All divisors of `number`, ascending."""
    small = [size for size in range(1, int(number**0.5) + 1) if number % size == 0]
    return tuple(sorted({*small, *(number // size for size in small)}))


def describe_mesh(mesh: Mesh) -> str:
    """The axes larger than one, outer to inner: `pp 2 x dp_shard 4 x tp 8`, or `1 device`."""
    parts = [f"{name} {mesh.size(name)}" for name in ("pp", "dp_replicate", "dp_shard", "cp", "tp") if mesh.size(name) > 1]
    text = " x ".join(parts) or "1 device"
    return f"{text} (ep {mesh.ep})" if mesh.ep > 1 else text


def describe(strategy: Strategy) -> str:
    """One strategy in one line."""
    parts = [describe_mesh(strategy.mesh), f"micro-batch {strategy.micro_batch}"]
    if strategy.zero_stage:
        parts.append(f"ZeRO-{strategy.zero_stage}")
    if strategy.schedule != "none":
        parts.append(strategy.schedule + (f" x {strategy.vpp} chunks" if strategy.vpp > 1 else ""))
    if strategy.sequence_parallel:
        parts.append("sequence parallel")
    if strategy.mesh.cp > 1:
        parts.append(f"{strategy.cp_kind} context parallel")
    text = f"first {strategy.recompute_layers} layers" if strategy.recompute == "first_k" else strategy.recompute
    parts.append("no recompute" if text == "none" else f"recompute {text}")
    parts += [name for name, on in (("no flash attention", not strategy.flash_attention), ("compiled", strategy.compile)) if on]
    return ", ".join(parts)


def require_homogeneous(cluster: Cluster) -> None:
    """Raises InputError for a cluster of several pools: one mesh spreads equal ranks."""
    if len(cluster.pools) > 1:
        names = ", ".join(f"{pool.num_devices} x {pool.device.device_id}" for pool in cluster.pools)
        raise InputError(f"{names} are different devices", where=f"cluster {cluster.name}", remedy="plan for one pool at a time")
