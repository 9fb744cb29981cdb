"""What no estimate can beat: lower bounds of seconds and bytes that prune the space before strategies are priced in full.

Time. Let T_c be the compute and blocking communication of one micro-batch in chunk c, forward, recompute and backward (costmodel.blocks), and m the number of
micro-batches. In any order of actions rank r is busy m * sum(T_c of r); before its first forward one micro-batch has passed the first chunks of the ranks
before it, and after its last backward the same micro-batch passes them back. So

    step_s >= max over r of  m * sum_{c on r} T_c + sum_{j < r} T_j  + optimizer_r                                         (chunk_bound_s)

Over every split of a total T into pp ranks of one chunk each, the least value of the right side is T / (1 - (1 - 1/m)^pp): equality on all ranks makes
T_r = T_0 (1 - 1/m)^r. With several chunks per rank the fill shrinks and m * T / pp remains                                    (split_bound_s)
Where backward is split, weight gradients fill what the passing leaves: no fill counts.

Before a mesh is looked at, T is at least what the kernels of the whole batch take at the speed of endless ones                (costmodel.compute.least_s)

Bytes. Weights, gradients and optimizer states, each over as many ranks as the strategy may shard it                          (states_bytes)
"""

from __future__ import annotations

from collections.abc import Sequence

from costmodel.engine import Engine
from costmodel.mesh import Mesh
from costmodel.optimizers import optimizer
from costmodel.work import DTYPE_BYTES
from planner.graph import Graph
from planner.job import Job
from planner.lower import storage_dtype


def chunk_bound_s(chunks: Sequence[tuple[int, float]], num_micro_batches: int, extra_s: Sequence[float], *, fills: bool = True) -> float:
    """The largest over ranks of m * work + fill + extra, for chunks (rank, seconds of one micro-batch) in execution order; no fill unless `fills`."""
    num_ranks = len(extra_s)
    work = [0.0] * num_ranks
    for rank, seconds in chunks:
        work[rank] += seconds
    best = fill = 0.0
    for rank in range(num_ranks):
        best = max(best, num_micro_batches * work[rank] + fill + extra_s[rank])
        fill += chunks[rank][1] if fills else 0.0
    return best


def split_bound_s(total_s: float, num_micro_batches: int, num_ranks: int, *, interleaved: bool) -> float:
    """The least that any split of `total_s` (one micro-batch through the whole model) over pipeline ranks can take."""
    if interleaved:
        return num_micro_batches * total_s / num_ranks
    return total_s / (1.0 - (1.0 - 1.0 / num_micro_batches) ** num_ranks)


def states_bytes(graph: Graph, job: Job, engine: Engine, mesh: Mesh, zero_stage: int) -> float:
    """Weights, gradients and optimizer states of the average rank."""
    dtype = storage_dtype(job.precision)
    weight_dtype = dtype if engine.parameters_dtype == "compute" else engine.parameters_dtype
    gradient_dtype = weight_dtype if engine.gradient_dtype == "parameter" else engine.gradient_dtype
    state = optimizer(job.optimizer).state_bytes + (4.0 if engine.master_weights and weight_dtype != "fp32" else 0.0)
    ranks = mesh.pp * mesh.tp

    def ways(stage: int) -> int:
        return ranks * (mesh.dp_shard * mesh.cp if zero_stage >= stage else mesh.ep)

    trained = graph.num_trainable_parameters
    weights = graph.num_parameters * float(DTYPE_BYTES[weight_dtype]) / ways(3)
    return weights + trained * (DTYPE_BYTES[gradient_dtype] / ways(2) + state / ways(1))
