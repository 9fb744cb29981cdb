"""Which modules of a captured block cannot be split by cutting their weight contiguously (Block.unsplit).

A weight can when it is that of an nn.Linear and the features that tensor parallelism divides are the outermost factor of the dim that is cut: heads that
each hold q, k and v can, q, k and v of all heads one after the other cannot.
"""

from __future__ import annotations

from torch import nn

from planner.capture_atoms import Leaves
from planner.capture_axes import Axes
from planner.capture_roles import Roles
from planner.capture_trace import Trace

STACKED = "holds several projections one after the other"


def unsplit_modules(
    module: nn.Module, layouts: tuple[tuple[str, str], ...], trace: Trace, axes: Axes, roles: Roles, *, layer: bool
) -> tuple[tuple[str, str], ...]:
    """(module or parameter, why) for the divided entries of `layouts`; `module` owns the paths; `layer`: it is a block, not what surrounds them."""
    modules = dict(module.named_modules(remove_duplicate=False))
    found = []
    for name, style in layouts:
        if style == "replicate":
            continue
        why = _not_linear(modules.get(name), style, layer=layer) or (_stacked(f"{name}.weight", style, trace, axes, roles) if layer else "")
        if why:
            found.append((name, why))
    return tuple(found)


def _not_linear(module: nn.Module | None, style: str, *, layer: bool) -> str:
    if module is None:
        return "is a parameter beside modules"
    if isinstance(module, nn.Linear) and not (layer and style == "vocab"):
        return ""
    if isinstance(module, nn.Embedding) and not layer:
        return ""
    return f"is a {type(module).__name__}" + (" inside a layer" if layer and isinstance(module, nn.Embedding | nn.Linear) else "")


def _stacked(name: str, style: str, trace: Trace, axes: Axes, roles: Roles) -> str:
    weight = trace.parameters.get(name)
    for index, matmul in axes.matmuls.items():
        if weight is None or matmul.weight != weight.storage or trace.records[index].phase != "forward":
            continue
        dim: Leaves = axes.atoms.leaves(matmul.n if style == "column" else matmul.k)
        return "" if dim and dim[0] in roles.divided else STACKED
    return ""
