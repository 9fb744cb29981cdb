"""Partial sums are added to one another before anything else is."""

from __future__ import annotations

from dataclasses import replace

from planner.graph import Block, Loop, Node, Tensor
from planner.sums import partial_sums, sum_partials_first

ROWS = ("batch", "sequence", "")


def _matmul(name: str, source: str) -> Node:
    loops = (Loop(name="m", size=8, axis="tokens"), Loop(name="n", size=4), Loop(name="k", size=4, axis="ffn"))
    return Node(node_id=f"mm.{name}", op="gemm", phase="backward", inputs=(source,), outputs=(name,), loops=loops, role="dgrad")


def _add(left: str, right: str, out: str) -> Node:
    return Node(node_id=f"add.{out}", op="elementwise", phase="backward", inputs=(left, right), outputs=(out,))


def _block(*nodes: Node) -> Block:
    names = dict.fromkeys(name for node in nodes for name in (*node.inputs, *node.outputs))
    made = {name for node in nodes for name in node.outputs}
    tensors = tuple(Tensor(tensor_id=name, shape=(1, 8, 4), axes=ROWS, kind="activation" if name in made else "input") for name in names)
    return Block(kind_id="b", role="layer", nodes=nodes, tensors=tensors, inputs=(), outputs=(), saved=())


# residual r, then the gradients of v, k and q, added as autograd does when the residual's arrives first
CHAIN = _block(
    _matmul("v", "dv"), _add("r", "v", "s1"), _matmul("k", "dk"), _add("s1", "k", "s2"), _matmul("q", "dq"), _add("s2", "q", "s3")
)


def test_residual_is_added_last():
    assert partial_sums(CHAIN) == ()
    ordered = sum_partials_first(CHAIN)
    adds = [(node.inputs, node.outputs) for node in ordered.nodes if node.op == "elementwise"]
    assert adds == [(("v", "k"), ("s1",)), (("s1", "q"), ("s2",)), (("s2", "r"), ("s3",))]
    assert len(partial_sums(ordered)) == 2


def test_order_stays_executable():
    exist = {"r", "dv", "dk", "dq"}
    for node in sum_partials_first(CHAIN).nodes:
        assert set(node.inputs) <= exist
        exist |= set(node.outputs)


def test_a_sum_that_somebody_else_reads_is_left_alone():
    reader = Node(node_id="norm", op="norm", phase="backward", inputs=("s1",), outputs=("x",))
    block = _block(*CHAIN.nodes, reader)
    assert sum_partials_first(block).nodes[1] == CHAIN.nodes[1]


def test_nothing_to_reorder():
    pure = _block(_matmul("v", "dv"), _matmul("k", "dk"), _add("v", "k", "s"))
    assert sum_partials_first(pure) == pure
    single = _block(_matmul("v", "dv"), _add("r", "v", "s1"), _add("s1", "t", "s2"))
    assert sum_partials_first(single) == single
    assert sum_partials_first(replace(CHAIN, nodes=())).nodes == ()
