"""Problem: one graph to train on one cluster under one engine, and how each kind of input becomes one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from os import PathLike
from typing import TYPE_CHECKING

from costmodel.engine import Engine
from costmodel.errors import InputError
from costmodel.hardware import Cluster
from costmodel.units import format_percent
from planner.graph import Graph
from planner.job import Job
from planner.lower import storage_dtype
from planner.models import ModelSpec, resolve, spec_graph
from planner.restrict import Restrictions
from planner.space import Extents, Space, require_homogeneous

if TYPE_CHECKING:
    from torch import nn

    Model = str | PathLike[str] | Mapping[str, object] | ModelSpec | Graph | nn.Module


DEFAULT_HEADROOM_FRAC = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """What is to be planned: `model` is the user's name for it, `spec` is None when it came as a graph or an nn.Module.

    headroom_frac: the share of a device's memory that a search leaves free, in [0, 1), for what no estimate sees (fragmentation, libraries, other processes).
    """

    model: str
    graph: Graph
    cluster: Cluster
    job: Job
    engine: Engine
    spec: ModelSpec | None = None
    headroom_frac: float = 0.0

    def __post_init__(self) -> None:
        require_homogeneous(self.cluster)
        if not 0.0 <= self.headroom_frac < 1.0:
            raise InputError(
                f"headroom {self.headroom_frac!r}", where="headroom_frac", remedy="give a share of the device in [0, 1), such as 0.05"
            )

    def with_headroom(self, frac: float | None) -> Problem:
        """The problem whose search leaves `frac` of a device free; None leaves 5 % of an accelerator (what memory_risk calls RISKY) and nothing of a CPU rank,
        whose memory can be swapped."""
        default = 0.0 if self.cluster.pool.device.kind == "cpu" else DEFAULT_HEADROOM_FRAC
        return replace(self, headroom_frac=default if frac is None else frac)

    def space(self, restrictions: Restrictions) -> Space:
        """The strategies that may be chosen."""
        extents = Extents.of(self.graph)
        return Space(extents=extents, cluster=self.cluster, job=self.job, engine=self.engine, restrictions=restrictions)

    def assumptions(self) -> tuple[str, ...]:
        """What was assumed while reading the inputs, without repeats."""
        kept = (f"{format_percent(self.headroom_frac)} of each device's memory stays free (headroom)",) if self.headroom_frac else ()
        return tuple(dict.fromkeys((*kept, *self.cluster.notes, *self.graph.notes)))


def problem_of(model: Model, cluster: Cluster | str, job: Job, engine: Engine) -> Problem:
    """The problem of a model given by name, path, config, ModelSpec, Graph or nn.Module. Raises InputError.

    An nn.Module is captured on fake tensors (torch is imported then); everything else never imports torch.
    """
    cluster = Cluster.parse(cluster) if isinstance(cluster, str) else cluster
    for value, kind, remedy in ((cluster, Cluster, "Cluster.parse(...) or its text, such as 8xH100"), (job, Job, "planner.Job")):
        if not isinstance(value, kind):
            raise InputError(f"{type(value).__name__} is not a {kind.__name__}", where=kind.__name__.lower(), remedy=f"give a {remedy}")
    if isinstance(model, Graph):
        return Problem(model=model.name, graph=model, cluster=cluster, job=job, engine=engine)
    if isinstance(model, str | PathLike | Mapping | ModelSpec):
        spec = resolve(model)
        graph = spec_graph(spec, batch=1, sequence=job.seq_len)
        return Problem(model=spec.name, graph=graph, cluster=cluster, job=job, engine=engine, spec=spec)
    if isinstance(model, type) or not hasattr(model, "named_parameters"):
        remedy = "give a name, a config.json or its folder, a ModelSpec, a Graph, or a built nn.Module"
        raise InputError(f"{model!r:.60} is not a model", where="model", remedy=remedy)
    return capture_problem(model, cluster, job, engine)


def capture_problem(
    module: nn.Module, cluster: Cluster, job: Job, engine: Engine, *, loss_fn: object = None, example_inputs: object = None
) -> Problem:
    """The problem of an nn.Module. Imports torch. Raises InputError when the module cannot be captured (planner.capture)."""
    from planner.capture import capture

    accelerated = cluster.pool.device.kind != "cpu"
    graph = capture(
        module, sequence=job.seq_len, example_inputs=example_inputs, loss_fn=loss_fn, dtype=storage_dtype(job.precision),
        fused_kernels=accelerated,
    )  # fmt: skip
    return Problem(model=graph.name, graph=graph, cluster=cluster, job=job, engine=engine)
