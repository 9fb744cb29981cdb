"""autoplan: the fastest training plan that fits, for a PyTorch model on a cluster.

    from planner import autoplan, Cluster, Job
    plan = autoplan("llama3-8b", Cluster.parse("8xH100"), Job(global_batch=128, seq_len=8192))
    print(plan)

Names are imported when first used, so `import planner` costs nothing and never loads torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from costmodel.engine import Engine, engine
    from costmodel.errors import AutoplanError, InfeasibleError, InputError, LossyExportError, UnprovenError
    from costmodel.estimate import Estimate
    from costmodel.hardware import Cluster
    from costmodel.mesh import Mesh
    from planner.facade import autoplan, estimate, plan_for
    from planner.graph import Graph
    from planner.job import Job
    from planner.models import ModelSpec
    from planner.plan import Plan
    from planner.strategy import Strategy

_HOMES = {
    "autoplan": "planner.facade", "estimate": "planner.facade", "plan_for": "planner.facade",
    "Plan": "planner.plan", "Job": "planner.job", "Strategy": "planner.strategy", "Graph": "planner.graph", "ModelSpec": "planner.models",
    "Cluster": "costmodel.hardware", "Mesh": "costmodel.mesh", "Estimate": "costmodel.estimate",
    "Engine": "costmodel.engine", "engine": "costmodel.engine",
    "AutoplanError": "costmodel.errors", "InputError": "costmodel.errors", "InfeasibleError": "costmodel.errors",
    "LossyExportError": "costmodel.errors", "UnprovenError": "costmodel.errors",
}  # fmt: skip

__all__ = [
    "AutoplanError", "Cluster", "Engine", "Estimate", "Graph", "InfeasibleError", "InputError", "Job", "LossyExportError", "Mesh", "ModelSpec",
    "Plan", "Strategy", "UnprovenError", "autoplan", "engine", "estimate", "plan_for",
]  # fmt: skip


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'planner' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
