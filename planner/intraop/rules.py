"""The algebra: which loops of a kernel may be divided over ranks, and what that makes of its tensors.

Dividing a loop cuts every operand that has it, leaves the others whole, cuts the results that have it, and leaves addends (P) of those that were summed over
it. Nothing of this looks at what a dim means for tensor parallelism: labels only say which dims are the same (planner.intraop.notation). Per kind of kernel:

    gemm           out[m, n] = sum_k a[m, k] b[k, n] (+ bias[n]): every loop; under k an addend of the bias is read     `_matmul`
    grouped_gemm   the same; rows belong to experts by value, so neither rows nor groups are divided                    `_matmul`
    conv           y[b, o, ..] = sum_i x[b, i, ..] w[o, i, ..]: b, o, i                                                 `_convolution`
    attention      batch, heads (with the key heads), and query rows of the forward with whole keys                     `_attention`
    norm           the indices that its statistics have; sums of parameter gradients become addends                     `_norm`
    softmax        every index; the last dim, which it normalises, costs two all-reduces of a row forward, one backward    `_softmax`
    cross_entropy  rows and classes; the loss is an addend                                                              `_loss`
    embedding      rows of the table (addends of the result), columns, tokens (addends of the gradient)                 `_embedding`
    elementwise, copy, reduce   every index that all tensors have or are constant along; sums over it are addends        `_pointwise`
    index          none: its access depends on values

Linear kernels (casts, copies, additions, sums) also take addends and give addends. The backward kernels are nodes like all others, so the gradient of a
replicated tensor from divided data comes out as an addend by the same rule.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from planner.graph import TOKEN_AXES, Loop, Node, Tensor
from planner.intraop.layout import PARTIAL, REPLICATE, shard, shard_dim
from planner.intraop.notation import aligned, factored, is_constant, label_dims

Tensors = dict[str, Tensor]
Dims = dict[str, int]

# Kernels of class elementwise or copy whose result at one place depends on other places, or on where the place is.
_POSITIONAL = frozenset({"cumsum", "cumprod", "logcumsumexp", "roll", "flip", "tril", "triu", "arange", "eye", "rot90"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One way to run a kernel: placements of its tensors, the loops whose size shrinks, its share of the flops, statistics to all-reduce."""

    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    loops: tuple[str, ...] = ()
    flops_frac: float = 1.0
    num_statistics: int = 0
    statistics_bytes: float = 0.0


def rules(node: Node, tensors: Tensors, size: int, nodes: dict[str, Node]) -> tuple[Rule, ...]:
    """The ways to run `node` on `size` ranks; the first is the replicated one. `nodes`: the block's, by id."""
    replicated = Rule(name="", inputs=(REPLICATE,) * len(node.inputs), outputs=(REPLICATE,) * len(node.outputs))
    found = [replicated]
    if size > 1:
        makers = {
            "gemm": _matmul, "grouped_gemm": _matmul, "conv": _convolution, "norm": _norm, "softmax": _softmax,
            "embedding": _embedding, "elementwise": _pointwise, "copy": _pointwise, "reduce": _pointwise,
        }  # fmt: skip
        if node.op in ("attention", "cross_entropy"):
            made = (_attention if node.op == "attention" else _loss)(node, tensors, size, nodes)
        else:
            made = makers.get(node.op, _nothing)(node, tensors, size)
        found += [rule for rule in made if _divides(node, rule, tensors, size)]
        if _is_linear(node):
            found.append(Rule(name="addends", inputs=(PARTIAL,) * len(node.inputs), outputs=(PARTIAL,) * len(node.outputs)))
    return tuple(dict.fromkeys(found))


def _nothing(node: Node, tensors: Tensors, size: int) -> Iterator[Rule]:
    yield from ()


def _divides(node: Node, rule: Rule, tensors: Tensors, size: int) -> bool:
    """Whether every cut dim and every divided loop is a multiple of the ranks, and a tensor that is read twice is cut once."""
    pairs = (*zip(node.inputs, rule.inputs, strict=True), *zip(node.outputs, rule.outputs, strict=True))
    for name, placement in pairs:
        dim = shard_dim(placement)
        if dim is not None and tensors[name].shape[dim] % size:
            return False
    wanted: dict[str, set[str]] = {}
    for name, placement in zip(node.inputs, rule.inputs, strict=True):
        wanted.setdefault(name, set()).add(placement)
    return all(len(places) == 1 for places in wanted.values()) and all(
        loop.size % size == 0 for loop in node.loops if loop.name in rule.loops
    )


def _stem(node: Node) -> str:
    return node.node_id.rpartition("/")[2].rpartition(":")[2].rpartition(".")[0]


def _is_linear(node: Node) -> bool:
    """Whether the sum of what it makes of addends is what it makes of the sum."""
    if node.op == "copy":
        return bool(node.inputs) and _stem(node) not in _POSITIONAL
    if node.op == "reduce":
        return _stem(node) in ("sum", "mean")
    return node.op == "elementwise" and (
        _stem(node) == "neg" or (_stem(node) in ("add", "add_", "accumulate", "sub") and len(node.inputs) > 1)
    )


def _rule(node: Node, name: str, cut: Dims, *, summed: bool, size: int, **facts: object) -> Rule:
    """The rule that cuts dim cut[t] of every tensor t it names; other inputs are whole, other outputs addends when `summed`."""

    def place(tensor: str, other: str) -> str:
        return shard(cut[tensor]) if tensor in cut else other

    return Rule(
        name=name,
        inputs=tuple(place(tensor, REPLICATE) for tensor in node.inputs),
        outputs=tuple(place(tensor, PARTIAL if summed else REPLICATE) for tensor in node.outputs),
        flops_frac=1.0 / size,
        **facts,  # type: ignore[arg-type]
    )


# -- kernels without loops -------------------------------------------------------------------------------------------------------------


def _indices(node: Node, tensors: Tensors) -> Iterator[tuple[int, Tensor, Dims, bool]]:
    """(dim of the largest tensor, that tensor, the dims of all tensors that have this index, whether an output is constant along it)."""
    names = tuple(dict.fromkeys((*node.outputs, *node.inputs)))
    if not names:
        return
    reference = max((tensors[name] for name in names), key=lambda tensor: tensor.num_elements)
    pairs = {name: aligned(reference, tensors[name]) for name in names}
    for dim, extent in enumerate(reference.shape):
        cut = {name: pairs[name][dim] for name in names if dim in pairs[name]}
        lacking = [name for name in names if name not in cut]
        if extent > 1 and reference.tensor_id in cut and all(is_constant(reference, tensors[name], pairs[name]) for name in lacking):
            yield dim, reference, cut, any(name in node.outputs for name in lacking)


def _pointwise(node: Node, tensors: Tensors, size: int) -> Iterator[Rule]:
    if _stem(node).strip("_") in _POSITIONAL:
        return
    sums = node.op == "reduce" and _stem(node) in ("sum", "mean")
    for dim, reference, cut, lacking in _indices(node, tensors):
        if not lacking or sums:
            yield _rule(node, _index_name(reference, dim), cut, summed=True, size=size)


def _index_name(tensor: Tensor, dim: int) -> str:
    return tensor.axes[dim] or f"dim{dim}"


def _softmax(node: Node, tensors: Tensors, size: int) -> Iterator[Rule]:
    for dim, reference, cut, lacking in _indices(node, tensors):
        rows = 4.0 * reference.num_elements / reference.shape[dim]
        last = dim == len(reference.shape) - 1
        count = (2 if node.phase == "forward" else 1) if last else 0
        if not lacking:
            yield _rule(
                node,
                _index_name(reference, dim),
                cut,
                summed=False,
                size=size,
                num_statistics=count,
                statistics_bytes=rows if last else 0.0,
            )


def _loss(node: Node, tensors: Tensors, size: int, nodes: dict[str, Node]) -> Iterator[Rule]:
    """A loss of logits, not of a softmax's result, normalises its rows too."""
    normalised = any(other.op == "softmax" and node.inputs[0] in other.outputs for other in nodes.values())
    for dim, reference, cut, _ in _indices(node, tensors):
        inner = dim == len(reference.shape) - 1 and not normalised and node.phase == "forward"
        rows = 4.0 * reference.num_elements / reference.shape[dim]
        yield _rule(
            node, _index_name(reference, dim), cut, summed=True, size=size,
            num_statistics=2 if inner else 0, statistics_bytes=rows if inner else 0.0,
        )  # fmt: skip


def _norm(node: Node, tensors: Tensors, size: int) -> Iterator[Rule]:
    names = (*node.inputs, *node.outputs) if node.phase == "forward" else node.inputs
    largest = max(tensors[name].num_elements for name in names)
    statistics = [
        name
        for name in names
        if tensors[name].kind != "parameter" and tensors[name].num_elements < largest and tensors[name].dtype == "fp32"
    ]
    for dim, reference, cut, _ in _indices(node, tensors):
        if all(name in cut for name in statistics) and (statistics or reference.axes[dim] in TOKEN_AXES):
            yield _rule(node, _index_name(reference, dim), cut, summed=node.phase == "backward", size=size)


def _embedding(node: Node, tensors: Tensors, size: int) -> Iterator[Rule]:
    """forward (ids, table) -> rows; backward (gradient of rows, ids) -> gradient of the table."""
    if len(node.inputs) != 2 or len(node.outputs) != 1:
        return
    forward = node.phase == "forward"
    ids, table = node.inputs[0 if forward else 1], node.inputs[1] if forward else node.outputs[0]
    rows = node.outputs[0] if forward else node.inputs[0]
    width = len(tensors[rows].shape) - 1
    if len(tensors[table].shape) != 2 or tensors[rows].shape[-1] != tensors[table].shape[-1]:
        return
    yield _rule(node, "vocab", {table: 0}, summed=forward, size=size)
    yield _rule(node, "width", {table: 1, rows: width}, summed=False, size=size)
    if tensors[ids].shape == tensors[rows].shape[:-1]:
        for dim in range(width):
            yield _rule(node, _index_name(tensors[rows], dim), {ids: dim, rows: dim}, summed=True, size=size)


def _convolution(node: Node, tensors: Tensors, size: int) -> Iterator[Rule]:
    """forward (x, w, bias) -> y; backward (gradient of y, x, w) -> gradients of x, w and bias. Channels only where there is one group."""
    forward = node.phase == "forward"
    if len(node.inputs) < (2 if forward else 3):
        return
    of = [node.outputs[0]] if forward else [node.inputs[0]]
    to, weights = ([node.inputs[0]], [node.inputs[1]]) if forward else ([node.inputs[1]], [node.inputs[2]])
    x, w, y = (tensors[names[0]] for names in (to, weights, of))
    if x.shape == w.shape or not 3 <= len(x.shape) == len(w.shape) == len(y.shape):
        return
    if not forward:
        to += [name for name in node.outputs if tensors[name].shape == x.shape]
        weights += [name for name in node.outputs if tensors[name].shape == w.shape]
    biases = [name for name in (*node.inputs, *node.outputs) if tensors[name].shape == (w.shape[0],)]
    yield _rule(node, "batch", dict.fromkeys((*of, *to), 0), summed=True, size=size)
    if w.shape[1] == x.shape[1] and w.shape[0] == y.shape[1]:
        yield _rule(node, "n", {**dict.fromkeys(of, 1), **dict.fromkeys((*weights, *biases), 0)}, summed=True, size=size)
        made = _rule(node, "k", dict.fromkeys((*to, *weights), 1), summed=forward, size=size)
        yield _with_addends(made, node, biases)


def _with_addends(rule: Rule, node: Node, names: list[str]) -> Rule:
    places = tuple(PARTIAL if name in names else place for name, place in zip(node.inputs, rule.inputs, strict=True))
    return Rule(name=rule.name, inputs=places, outputs=rule.outputs, loops=rule.loops, flops_frac=rule.flops_frac)


# -- kernels with loops ----------------------------------------------------------------------------------------------------------------


def _matmul(node: Node, tensors: Tensors, size: int) -> Iterator[Rule]:
    loop = {item.name: item for item in node.loops}
    if not {"m", "n", "k"} <= set(loop) or len(node.inputs) < 2:
        return
    others = tuple(item for name, item in loop.items() if name not in ("m", "n", "k", "groups"))
    expert = (loop["groups"],) if "groups" in loop else ()
    weighs = node.role == "wgrad"
    has = {
        node.inputs[0]: (*others, loop["m"], loop["k"]),
        node.inputs[1]: (*others, *(() if weighs else expert), loop["k"], loop["n"]),
        node.outputs[0]: (*others, *(expert if weighs else ()), loop["m"], loop["n"]),
    }
    biases = [] if expert else [name for name in node.inputs[2:] if tensors[name].num_elements == loop["n"].size]
    has.update(dict.fromkeys(biases, (loop["n"],)))
    if len(node.inputs) - len(biases) > 2 + len(expert) or node.inputs[0] == node.inputs[1]:
        return
    places = {name: factored(tensors[name], loops) for name, loops in has.items()}
    free = [loop["n"], loop["k"]] if expert and not weighs else [loop["m"], loop["n"]] if expert else [*others, *loop.values()]
    for item in dict.fromkeys(free):
        holders = [name for name, loops in has.items() if item in loops]
        for label, cut in _cuts(item, holders, places, tensors):
            made = _rule(node, label, cut, summed=True, size=size, loops=(item.name,))
            yield _with_addends(made, node, biases) if item.name == "k" else made


def _cuts(
    loop: Loop, holders: list[str], places: dict[str, dict[str, tuple[int, ...]] | None], tensors: Tensors
) -> Iterator[tuple[str, Dims]]:
    """(name, tensor -> dim) of every way to cut a loop: along each kind of token dim, else along the outermost of its dims."""
    groups = {}
    for name in holders:
        found = places[name]
        if found is None or not found[loop.name]:
            return
        groups[name] = found[loop.name]
    labels = ("batch", "sequence") if loop.axis == "tokens" else ("",)
    for label in labels:
        cut = {}
        for name, dims in groups.items():
            token = [dim for dim in dims if tensors[name].axes[dim] in (label, "tokens" if label == "sequence" else label)]
            if label and token:
                cut[name] = token[0]
            elif not label:
                cut[name] = dims[0]
        sizes = {prod(tensors[name].shape[dim] for dim in groups[name]) for name in groups}
        if len(cut) == len(groups) and len(sizes) == 1 and _same_extent(cut, tensors, loop):
            yield f"{loop.name}:{label}" if label else loop.name, cut


def _same_extent(cut: Dims, tensors: Tensors, loop: Loop) -> bool:
    """Whether the cut dims are one index: equal sizes, or a labelled dim of heads beside one of heads x head_dim."""
    sizes = {tensors[name].shape[dim] for name, dim in cut.items()}
    return len(sizes) == 1 or bool(loop.axis)


def _attention(node: Node, tensors: Tensors, size: int, nodes: dict[str, Node]) -> Iterator[Rule]:
    names = tuple(dict.fromkeys((*node.inputs, *node.outputs)))
    batch = {name: dims[0] for name in names if (dims := label_dims(tensors[name], "batch"))}
    heads = {name: dims[0] for name in names if (dims := label_dims(tensors[name], "heads", "kv_heads"))}
    rows = [name for name in names if label_dims(tensors[name], "sequence")]
    if set(rows) <= set(batch):
        yield _rule(node, "batch", batch, summed=False, size=size, loops=("batch",))
    if set(rows) <= set(heads):
        yield _rule(node, "heads", heads, summed=False, size=size, loops=("heads", "kv_heads"))
    forward = nodes.get(node.forward_id, node)
    if len(forward.inputs) != 3 or len(set(forward.inputs)) != 3 or (node.phase == "backward" and len(node.outputs) != 3):
        return
    keys = {*forward.inputs[1:3], *(node.outputs[1:3] if node.phase == "backward" else ())}
    cut = {name: label_dims(tensors[name], "sequence")[0] for name in rows if name not in keys}
    frac = (2.0 - 1.0 / size) / size if node.causal else 1.0 / size
    made = _rule(node, "q", cut, summed=node.phase == "backward", size=size, loops=("q",))
    yield Rule(name="q", inputs=made.inputs, outputs=made.outputs, loops=made.loops, flops_frac=frac)
