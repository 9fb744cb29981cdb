"""What no estimate can beat: lower bounds of seconds and bytes that prune the space before strategies are priced in full.

Time. costmodel.schedules.busy bounds chunks that are priced: m * work of a rank + what one micro-batch takes to reach it and to leave.
Over every split of a total T into pp ranks of one chunk each, the least value of the right side is T / (1 - (1 - 1/m)^pp): equality on all ranks makes
T_r = T_0 (1 - 1/m)^r. With several chunks per rank the fill shrinks and m * T / pp remains                                    (split_bound_s)
Where backward is split, weight gradients fill what the passing leaves: no fill counts.

Before a mesh is looked at, T is at least what the kernels of the whole batch take at the speed of endless ones                (costmodel.compute.least_s)

Bytes. Weights, gradients and optimizer states, each over as many ranks as the strategy may shard it                          (states_bytes)
"""

from __future__ import annotations

from costmodel.engine import Engine
from costmodel.mesh import Mesh
from costmodel.optimizers import optimizer
from costmodel.work import DTYPE_BYTES
from planner.graph import Graph
from planner.job import Job
from planner.lower import storage_dtype


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
