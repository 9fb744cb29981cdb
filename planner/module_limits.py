"""What an engine that trains the user's own module cannot do to a graph: reasons why tensor, sequence or pipeline parallelism is out, "" when they are not.

Such an engine (costmodel.engine.Engine.splits_modules) cuts the weights of nn.Linear and nn.Embedding contiguously, enters a module that holds
column-parallel linears with the whole hidden state, and cuts one list of blocks into pipeline stages. Engines with model code of their own (Megatron,
torchtitan) lay out weights as they need. The rules are those of passes.placements and passes.split, so that what was planned runs.
"""

from __future__ import annotations

from planner.graph import TENSOR_PARALLEL_AXES, Block, Graph


def tensor_obstacle(graph: Graph) -> str:
    """Why no linear can be split."""
    for block in graph.kinds:
        found = block.unsplit or _beside(block)
        if found:
            name, why = found[0]
            return f"{name} of {block.kind_id} {why}"
    return ""


def heads_obstacle(graph: Graph, tp: int) -> str:
    """Why key and value heads cannot be split: a contiguous cut has no copies to give away."""
    if graph.num_kv_heads and graph.num_kv_heads % tp:
        return f"{graph.num_kv_heads} key/value heads do not split into tp {tp} (no copies are made)"
    return ""


def uneven_obstacle(graph: Graph, tp: int) -> str:
    """Why the residual stream cannot be split evenly: images have as many tokens as patches, whatever the job says."""
    for block in graph.kinds:
        for node in block.nodes if block.role == "layer" else ():
            for loop in node.loops:
                if node.op == "attention" and loop.name == "q" and loop.size % tp:
                    return f"{loop.size} tokens of {block.kind_id} do not split into tp {tp}"
    return ""


def sequence_obstacle(graph: Graph) -> str:
    """Why the residual stream cannot be split over the sequence: attention whose linears are whole would see a part of it."""
    for block in graph.kinds:
        if block.role != "layer":
            continue
        for node in block.nodes:
            if node.op == "attention" and not any(loop.axis in TENSOR_PARALLEL_AXES for loop in node.loops):
                return f"attention of {block.kind_id} is not split over its heads, so it needs the whole sequence"
        for tensor in block.parameters:
            if "." not in tensor.tensor_id:
                return f"parameter {tensor.tensor_id} belongs to {block.kind_id} itself and would see a part of the sequence"
    return ""


def pipeline_obstacle(graph: Graph) -> str:
    """Why the layers are no chain that can be cut."""
    roles = {block.kind_id: block.role for block in graph.kinds}
    paths = [layer.path for layer in graph.layers if roles[layer.kind_id] == "layer"]
    lists = sorted({path.rpartition(".")[0] for path in paths})
    if len(lists) > 1:
        return f"the layers are in {len(lists)} lists ({', '.join(lists[:3])})"
    if any("." not in path or not path.rpartition(".")[2].isdigit() for path in paths):
        return f"layer {paths[0]} is no element of a list of blocks"
    for block in graph.kinds:
        for tensor in block.parameters if block.role != "layer" else ():
            owner = tensor.tensor_id.rpartition(".")[0]
            if paths and (not owner or f"{paths[0]}.".startswith(f"{owner}.")):
                return f"parameter {tensor.tensor_id} sits beside the list of layers, so no stage can claim it"
    for names in graph.tied:
        inside = [name for name in names if any(name.startswith(f"{path}.") for path in paths)]
        if inside:
            return f"{' and '.join(names)} are one parameter inside the layers"
    return ""


def _beside(block: Block) -> tuple[tuple[str, str], ...]:
    """Weights that stay whole inside a module whose other linears are split, and modules that are entered and hold a parameter themselves."""
    if block.role != "layer":
        return ()
    styles = dict(block.layouts)
    regions = {name.rpartition(".")[0] for name, style in styles.items() if style == "column"} - {""}
    shapes = {tensor.tensor_id: tensor.shape for tensor in block.parameters}
    found = []
    for name, style in styles.items():
        inside = any(name.startswith(f"{region}.") for region in regions)
        whole = any(len(shape) > 1 for key, shape in shapes.items() if key.startswith(f"{name}."))
        if style == "replicate" and inside and whole:
            found.append((name, "is not split but runs beside linears that are"))
        if name in regions:
            found.append((name, "holds a parameter of its own beside linears that are split"))
    return tuple(found)
