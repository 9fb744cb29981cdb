"""The fastest layout of one block kind on one mesh axis, as an integer program that HiGHS proves optimal.

Variables. x[v, r]: node v runs by rule r (binary). y[t, a]: tensor t that no node makes is held as a (binary). The placement of a made tensor is that of the
rule of its maker, so with X(t, a) for the sum of x[v, r] over rules that give t placement a (or y[t, a]) and D(u, b) for the sum over rules of
reader u that want b:

    minimise    sum c(v, r) x[v, r]  +  sum s(t, a, b) w[t, phase, a, b]
    subject to  sum_r x[v, r] = 1,  sum_a y[t, a] = 1                                      `_one_of`
                sum_b e[u, a, b] = X(t, a),   sum_a e[u, a, b] = D(u, b)   for each edge   `_edge`
                w[t, phase, a, b] >= e[u, a, b]  for every reader u in the phase           `_edge`: a copy is made once and shared
                sum m(t, a) X(t, a) <= memory                                              `_limit_memory`

c is planner.intraop.price.kernel_s, s is reshard_s, m the bytes of parameters with their states and of saved tensors. e and w are continuous: an edge
has as many columns as pairs of *placements* (at most a few dozen), not pairs of rules, and with x fixed the transport e is integral. What cannot be reached
(a cut tensor as an addend) has no column. After the solve planner.intraop.check walks the graph and must find the same price.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from costmodel.errors import InfeasibleError
from planner.graph import Block, Node, Tensor
from planner.intraop.borders import aliases, borders, choices
from planner.intraop.check import price_layout
from planner.intraop.highs import IntegerProgram, Solution, minimise
from planner.intraop.layout import BlockLayout, OpLayout
from planner.intraop.price import Prices, can_reshard
from planner.intraop.rules import Rule, rules

_TOLERANCE = 1e-6
Places = dict[str, list[int]]


def solve_layout(
    block: Block,
    prices: Prices,
    *,
    memory_bytes: float | None = None,
    num_micro_batches: int = 1,
    state_factor: float = 1.0,
    fixed: Mapping[str, str] | None = None,
    time_limit_s: float | None = None,
) -> BlockLayout:
    """The layout of `block` with the least seconds of kernels and collectives, forward and backward, on the axis of `prices`.

    memory_bytes: most bytes of parameters x `state_factor` (states for each byte of parameter) plus saved tensors on one rank. num_micro_batches share one
    reduction of parameter gradients. fixed: placements of inputs, parameters or outputs that are not to be chosen. time_limit_s: stop then with the best
    layout so far; its bound_s still holds.

    Raises InfeasibleError when nothing fits `memory_bytes`, or nothing was found in time.
    """
    model = _model(block, prices, fixed or {}, num_micro_batches)
    if memory_bytes is not None:
        _limit_memory(model, memory_bytes, state_factor)
    solution = minimise(model.program, time_limit_s)
    if solution is None:
        limit = "the time limit" if memory_bytes is None else f"{memory_bytes:.0f} bytes"
        raise InfeasibleError(
            f"no layout of {block.kind_id} on {prices.size} ranks within {limit}", where="solve_layout", remedy="allow more"
        )
    return _read(model, solution, num_micro_batches, state_factor)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Model:
    block: Block
    prices: Prices
    tensors: dict[str, Tensor]
    rules: dict[str, tuple[Rule, ...]]
    columns: dict[str, list[int]] = field(default_factory=dict)
    owners: dict[str, Places] = field(default_factory=dict)
    free: dict[str, Places] = field(default_factory=dict)
    shared: dict[tuple[str, str, str, str], int] = field(default_factory=dict)
    program: IntegerProgram = field(default_factory=IntegerProgram)


def _model(block: Block, prices: Prices, fixed: Mapping[str, str], num_micro_batches: int) -> _Model:
    tensors = {tensor.tensor_id: tensor for tensor in block.tensors}
    nodes = {node.node_id: node for node in block.nodes}
    model = _Model(
        block=block, prices=prices, tensors=tensors,
        rules={node.node_id: rules(node, tensors, prices.size, nodes) for node in block.nodes},
    )  # fmt: skip
    leaving = borders(block, prices.size, fixed)
    options = {**choices(block, prices.size, fixed), **{item.owner: item.options for item in leaving if item.options}}
    for name, places in options.items():
        model.free[name] = _one_of(model.program, dict.fromkeys(places, 0.0))
    model.owners.update(model.free)
    model.owners.update({name: model.free[owner] for name, owner in aliases(block).items()})
    for node in block.nodes:
        _add_node(model, node)
    for node in block.nodes:
        for position, name in enumerate(node.inputs):
            wanted: Places = {}
            for column, rule in zip(model.columns[node.node_id], model.rules[node.node_id], strict=True):
                wanted.setdefault(rule.inputs[position], []).append(column)
            _edge(model, name, node.phase, wanted, 1.0)
    for item in leaving:
        share = 1.0 / num_micro_batches if item.phase == "step" else 1.0
        _edge(model, item.tensor_id, item.phase, model.free[item.owner], share)
    return model


def _one_of(program: IntegerProgram, costs: Mapping[str, float]) -> Places:
    places = {name: [program.column(cost, binary=True)] for name, cost in costs.items()}
    program.row({column: 1.0 for columns in places.values() for column in columns}, 1.0, 1.0)
    return places


def _add_node(model: _Model, node: Node) -> None:
    found = model.rules[node.node_id]
    columns = [model.program.column(model.prices.kernel_s(node, rule, model.tensors), binary=True) for rule in found]
    model.program.row(dict.fromkeys(columns, 1.0), 1.0, 1.0)
    model.columns[node.node_id] = columns
    for position, name in enumerate(node.outputs):
        places: Places = {}
        for column, rule in zip(columns, found, strict=True):
            places.setdefault(rule.outputs[position], []).append(column)
        model.owners[name] = places


def _edge(model: _Model, name: str, phase: str, wanted: Places, share: float) -> None:
    """Columns that carry the placement of tensor `name` to what one reader wants."""
    program, owner = model.program, model.owners[name]
    if wanted is owner:
        return
    flow = {(a, b): program.column(0.0) for a in owner for b in wanted if can_reshard(a, b)}
    for places, index in ((owner, 0), (wanted, 1)):
        for place, columns in places.items():
            row = {column: 1.0 for pair, column in flow.items() if pair[index] == place}
            for column in columns:
                row[column] = row.get(column, 0.0) - 1.0
            program.row(row, 0.0, 0.0)
    for (a, b), column in flow.items():
        cost = share * model.prices.reshard_s(model.tensors[name], a, b)
        if cost > 0.0:
            key = (name, phase, a, b)
            if key not in model.shared:
                model.shared[key] = program.column(cost)
            program.row({model.shared[key]: 1.0, column: -1.0}, 0.0, None)


def _limit_memory(model: _Model, limit_bytes: float, state_factor: float) -> None:
    row: dict[int, float] = {}
    weights = [(tensor, state_factor) for tensor in model.block.parameters]
    weights += [(model.tensors[name], 1.0) for name in dict.fromkeys(model.block.saved) if name in model.owners]
    for tensor, factor in weights:
        for place, columns in model.owners[tensor.tensor_id].items():
            for column in columns:
                row[column] = row.get(column, 0.0) + factor * model.prices.num_bytes(tensor, place) / limit_bytes
    model.program.row(row, None, 1.0)


def _read(model: _Model, solution: Solution, num_micro_batches: int, state_factor: float) -> BlockLayout:
    """The layout of a solution, priced again from its placements. A disagreement is a bug: AssertionError."""
    block, taken = model.block, solution.chosen
    ops = []
    for node in block.nodes:
        columns = zip(model.columns[node.node_id], model.rules[node.node_id], strict=True)
        rule = next(rule for column, rule in columns if column in taken)
        ops.append(OpLayout(node_id=node.node_id, loop=rule.name, inputs=rule.inputs, outputs=rule.outputs))
    chosen = {name: next(place for place in places if places[place][0] in taken) for name, places in model.free.items()}
    priced = price_layout(block, ops, chosen, model.prices, num_micro_batches=num_micro_batches, state_factor=state_factor)
    if abs(priced.block_s - solution.objective_s) > _TOLERANCE * solution.objective_s:
        raise AssertionError(f"{block.kind_id}: the program says {solution.objective_s} s, its layout costs {priced.block_s} s")
    given = [(name, place) for name, place in chosen.items() if not name.endswith("@out")]
    given += [(name, chosen[owner]) for name, owner in aliases(block).items()]
    made = [pair for op, node in zip(ops, block.nodes, strict=True) for pair in zip(node.outputs, op.outputs, strict=True)]
    return BlockLayout(
        kind_id=block.kind_id, size=model.prices.size, ops=tuple(ops), owners=(*given, *made),
        borders=tuple((item.tensor_id, chosen[item.owner]) for item in borders(block, model.prices.size, {})),
        reshards=priced.reshards, objective_s=priced.block_s, bound_s=min(priced.block_s, solution.bound_s), memory_bytes=priced.memory_bytes,
        num_columns=model.program.num_columns, num_rows=model.program.num_rows,
    )  # fmt: skip
