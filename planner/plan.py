"""Plan: the frozen result. Decisions, the estimate of the step they lower to, the proof of the search, and why.

`planner.codec` writes it as canonical JSON and reads it back; passes, runtime and exporters read nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from costmodel.estimate import Estimate
from costmodel.hardware import Cluster
from planner.job import Job
from planner.models.spec import ModelSpec
from planner.strategy import Strategy

if TYPE_CHECKING:
    from planner.export.result import Exported

FORMAT_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One model chunk: `layer_paths` in execution order (embedding and head included where they sit), on pipeline rank `rank_index`.

    `recompute_layers` says how many of its layers (role "layer", from the first) recompute in full (0 with "none" and "selective").
    """

    stage_index: int
    rank_index: int
    layer_paths: tuple[str, ...]
    recompute_layers: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternative:
    """A plan that was considered: its strategy, predicted step time and peak, and how it compares in words.

    `fits` is false for one that was priced but needs more memory than a device offers.
    """

    strategy: Strategy
    step_s: float
    peak_bytes: float
    remark: str = ""
    fits: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejection:
    """`count` candidates refused for one `reason`; `example` is one of them in words."""

    reason: str
    count: int
    example: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """What the search can vouch for: nothing in the searched space is faster than `bound_s`; gap = (objective - bound) / objective.

    status: "optimal" (bound reached), "time limit", "interrupted", or "estimated" (the strategy was given, nothing was searched).
    """

    objective_s: float
    bound_s: float
    gap_frac: float
    method: str
    status: str
    num_candidates: int
    num_evaluated: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Decisions for one model, cluster, job and engine.

    `model` is the user's name for the model; `layouts` maps a module-path pattern (`*` stands for the layer index) to its tensor-parallel style
    (column, row, vocab, replicate), empty when tp == 1. `spec` lets the plan export without the model at hand; None for a
    captured nn.Module, whose sizes no launcher could build from. `alternatives` are the next best plans; `levers` are one-step changes of this plan
    (another micro-batch, recompute, optimizer, more nodes, ...), each re-priced; `rejections` count what cannot run and why.
    """

    model: str
    graph_id: str
    cluster: Cluster
    job: Job
    engine: str
    strategy: Strategy
    stages: tuple[Stage, ...]
    layouts: tuple[tuple[str, str], ...]
    estimate: Estimate
    proof: Proof
    assumptions: tuple[str, ...]
    alternatives: tuple[Alternative, ...] = ()
    levers: tuple[Alternative, ...] = ()
    rejections: tuple[Rejection, ...] = ()
    num_parameters: int = 0
    num_layers: int = 0
    tied: tuple[tuple[str, str], ...] = ()
    spec: ModelSpec | None = None
    format_version: int = FORMAT_VERSION

    def __str__(self) -> str:
        """The panel an engineer acts on, as plain text (planner.render)."""
        from planner.render import plan_text

        return plan_text(self)

    def explain(self) -> str:
        """Why this plan, what was second, what was rejected and what would have to change, as text (planner.explain)."""
        from planner.explain import explain

        return explain(self)

    def save(self, path: str | Path) -> None:
        """Write the canonical plan file, atomically (planner.codec)."""
        from planner.codec import save_plan

        save_plan(self, path)

    def export(self, target: str) -> Exported:
        """The plan as the files of a launcher, with what it cannot carry (planner.export). Raises InputError."""
        from planner.export import export

        return export(self, target)

    @staticmethod
    def load(path: str | Path) -> Plan:
        """Read a plan file. Raises InputError with the place of the first fault (planner.codec)."""
        from planner.codec import load_plan

        return load_plan(path)
