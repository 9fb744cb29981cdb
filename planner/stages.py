"""Stages: the layer sequence cut into pp x vpp chunks, each on the pipeline rank where its schedule wants it (looped or V-shaped, costmodel.schedule).

Only places between layers of role "layer" are cut: what comes before the first one (embedding) stays with the first chunk, what comes
after the last (head) with the last, an embedding in between (decoder side) with the layer that follows. `Strategy.stage_layers` may give the first and
the last chunk no layer at all: the one then holds the embedding alone, the other the head.

Without `Strategy.stage_layers` the cut minimises, over all cuts, first the work of the heaviest chunk and then the sum of squares of the
chunks' work; the work of a layer is its matmul and attention flops, forward and backward. Among equals fewer layers come first, since
early ranks of 1F1B hold more micro-batches. A chunk with embedding and head is thereby lighter in layers exactly where that balances
better. Engines without uneven stages get equal counts.
"""

from __future__ import annotations

from collections.abc import Sequence

from costmodel.engine import Engine
from costmodel.errors import InputError
from costmodel.schedule import rank_of_stage
from planner.graph import Graph
from planner.plan import Stage
from planner.strategy import Strategy


def split(graph: Graph, strategy: Strategy, engine: Engine) -> tuple[Stage, ...]:
    """The chunks of `strategy`, in execution order. Raises InputError when the layers cannot be cut so."""
    num_chunks = strategy.mesh.pp * strategy.vpp
    if graph.num_layers < num_chunks and not strategy.stage_layers:
        raise InputError(
            f"{graph.num_layers} layers cannot fill pp {strategy.mesh.pp} x vpp {strategy.vpp} = {num_chunks} chunks",
            where="Strategy.mesh.pp", remedy=f"use at most {graph.num_layers} chunks",
        )  # fmt: skip
    units = _units(graph)
    counts = strategy.stage_layers or _default(graph, units, num_chunks, engine)
    _check_counts(counts, graph.num_layers, num_chunks, strategy, engine)
    before, units, after = _apart(units, graph)
    ranks = rank_of_stage(strategy.schedule, pp=strategy.mesh.pp, vpp=strategy.vpp)
    stages, start = [], 0
    for index, count in enumerate(counts):
        paths = tuple(path for unit in units[start : start + count] for path in unit)
        paths = (before if index == 0 else ()) + paths + (after if index == num_chunks - 1 else ())
        recompute = {"full": count, "first_k": min(count, strategy.recompute_layers)}.get(strategy.recompute, 0)
        stages.append(Stage(stage_index=index, rank_index=ranks[index], layer_paths=paths, recompute_layers=recompute))
        start += count
    return tuple(stages)


def _units(graph: Graph) -> list[tuple[str, ...]]:
    """Layer paths grouped by the layer of role "layer" that they move with."""
    roles = {block.kind_id: block.role for block in graph.kinds}
    units: list[tuple[str, ...]] = []
    pending: tuple[str, ...] = ()
    for layer in graph.layers:
        pending += (layer.path,)
        if roles[layer.kind_id] == "layer":
            units.append(pending)
            pending = ()
    if pending and units:
        units[-1] += pending
    return units


def _apart(units: list[tuple[str, ...]], graph: Graph) -> tuple[tuple[str, ...], list[tuple[str, ...]], tuple[str, ...]]:
    """(what comes before the first layer, units without it and the next, what comes after the last layer)."""
    roles, kinds = {block.kind_id: block.role for block in graph.kinds}, {layer.path: layer.kind_id for layer in graph.layers}

    def layer_index(unit: tuple[str, ...]) -> int:
        return next(index for index, path in enumerate(unit) if roles[kinds[path]] == "layer")

    bare = list(units)
    last = layer_index(bare[-1]) + 1
    after, bare[-1] = bare[-1][last:], bare[-1][:last]
    first = layer_index(bare[0])
    before, bare[0] = bare[0][:first], bare[0][first:]
    return before, bare, after


def _check_counts(counts: Sequence[int], num_layers: int, num_chunks: int, strategy: Strategy, engine: Engine) -> None:
    where = "Strategy.stage_layers"
    if len(counts) != num_chunks:
        remedy = "give one number a chunk, in execution order"
        raise InputError(
            f"{len(counts)} numbers for pp {strategy.mesh.pp} x vpp {strategy.vpp} = {num_chunks} chunks", where=where, remedy=remedy
        )
    if min(counts) < 0 or 0 in counts[1:-1] or sum(counts) != num_layers:
        text, remedy = ", ".join(map(str, counts)), "every chunk needs a layer, but for the first (embedding) and the last (head)"
        raise InputError(f"{text} sum to {sum(counts)}; the model has {num_layers} layers", where=where, remedy=remedy)
    if len(set(counts)) > 1 and not engine.supports_uneven_stages:
        remedy = f"choose a number of chunks that divides {num_layers}"
        raise InputError(f"{engine.name} needs equal chunks, not {', '.join(map(str, counts))}", where=where, remedy=remedy)


def _default(graph: Graph, units: list[tuple[str, ...]], num_chunks: int, engine: Engine) -> tuple[int, ...]:
    if num_chunks == 1:
        return (len(units),)
    if not engine.supports_uneven_stages:
        base, extra = divmod(len(units), num_chunks)
        return tuple(base + (index < extra) for index in range(num_chunks))
    weight = {block.kind_id: block.flops("forward") + block.flops("backward") for block in graph.kinds}
    kind = {layer.path: layer.kind_id for layer in graph.layers}
    return balance([sum(weight[kind[path]] for path in unit) for unit in units], num_chunks)


def balance(weights: Sequence[float], num_chunks: int) -> tuple[int, ...]:
    """How many consecutive `weights` each chunk takes (at least one): least maximum, then least sum of squares, then fewest first. Needs len >= num_chunks."""
    prefix = [0.0]
    for weight in weights:
        prefix.append(prefix[-1] + weight)
    limit = _least_maximum(weights, prefix, num_chunks) * (1 + 1e-9)
    num = len(weights)
    # best[i] = (sum of squares, counts) of cutting weights[i:] into the chunks that are left
    best: list[tuple[float, tuple[int, ...]] | None] = [None] * num + [(0.0, ())]
    for left in range(1, num_chunks + 1):
        best = [_best_first_cut(start, left, prefix, limit, best) for start in range(num)] + [None]
    found = best[0]
    assert found is not None
    return found[1]


def _best_first_cut(
    start: int, left: int, prefix: list[float], limit: float, best: list[tuple[float, tuple[int, ...]] | None]
) -> tuple[float, tuple[int, ...]] | None:
    choice: tuple[float, tuple[int, ...]] | None = None
    for stop in range(start + 1, len(prefix) - left + 1):
        load, rest = prefix[stop] - prefix[start], best[stop]
        if load > limit:
            break
        if rest is not None and (choice is None or load * load + rest[0] < choice[0] * (1 - 1e-12)):
            choice = (load * load + rest[0], (stop - start, *rest[1]))
    return choice


def _least_maximum(weights: Sequence[float], prefix: list[float], num_chunks: int) -> float:
    """The smallest possible work of the heaviest chunk, by bisection over a greedy feasibility test."""

    def chunks(limit: float) -> int:
        count, load = 1, 0.0
        for weight in weights:
            if load + weight > limit and load > 0.0:
                count, load = count + 1, 0.0
            load += weight
        return count

    low, high = max(max(weights), prefix[-1] / num_chunks), prefix[-1]
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if chunks(middle) <= num_chunks else (middle, high)
    return high
