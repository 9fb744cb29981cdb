"""BlockBuilder: a small autograd that writes blocks. Families call operations; backward kernels, saved tensors and gradients follow from them.

An operation appends its forward kernel and a *rule* to a tape. `finish` walks the tape backwards as autograd does: a rule turns the gradients of its
outputs into gradients of its inputs and appends the kernels that do so; where a value is used twice the gradients are added by a kernel of their
own. A tensor is saved when a rule that will run asked for it, so frozen parameters and inputs without gradient save exactly what eager PyTorch saves.

Names: a forward kernel is `module/op.i`, its backward kernels `module/op.i:op.j`. The gradient of a tensor is called `<tensor>.grad`; what arrives from the
block behind is a tensor of kind "input" called `<output>.grad`; the gradient of parameter p is an activation called `<p>.grad`, made by a node whose role is
"wgrad"; the gradient of block input x leaves as `<x>.grad`. Gradients that are still to be added up end in `#i`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

from planner.graph import Block, Loop, Node, Tensor

Axes = tuple[str, ...]
Shape = tuple[int, ...]


class Variable:
    """What a program variable is to autograd: a view of the storage `tensor_id` with its own shape, dtype and `grad` (does it require one?)."""

    __slots__ = ("axes", "dtype", "grad", "shape", "tensor_id")

    def __init__(self, tensor_id: str, shape: Shape, axes: Axes, dtype: str, grad: bool) -> None:
        self.tensor_id, self.shape, self.axes, self.dtype, self.grad = tensor_id, shape, axes, dtype, grad


class _Entry(NamedTuple):
    """One step of the tape: a rule maps the gradients of `outputs` to those of `inputs`."""

    inputs: tuple[Variable, ...]
    outputs: tuple[Variable, ...]
    node_id: str
    module: str
    rule: Callable[..., Sequence[Variable | None]]


class BlockBuilder:
    """Collects one block. `module` names the module inside the block that the next kernels belong to; operations take it as their first argument."""

    def __init__(self, *, lora: tuple[int, tuple[str, ...]] = (0, ()), frozen: bool = False) -> None:
        self.lora = lora
        self.frozen = frozen
        self._tensors: dict[str, Tensor] = {}
        self._nodes: list[Node] = []
        self._tape: list[_Entry] = []
        self._saved: dict[str, None] = {}
        self._inputs: list[Variable] = []
        self._parameters: list[Variable] = []
        self._unsaved: set[str] = set()
        self._layouts: dict[str, str] = {}
        self._unsplit: dict[str, str] = {}
        self._counts: dict[str, int] = {}
        self._current: _Entry | None = None

    # -- tensors ---------------------------------------------------------------------------------------------------------------------

    def _add(self, name: str, shape: Shape, axes: Axes, dtype: str, kind: str, trainable: bool = False) -> str:
        tensor_id = name
        if name in self._tensors:
            self._counts[name] = self._counts.get(name, 0) + 1
            tensor_id = f"{name}#{self._counts[name]}"
        self._tensors[tensor_id] = Tensor(tensor_id=tensor_id, shape=shape, axes=axes, dtype=dtype, kind=kind, trainable=trainable)
        return tensor_id

    def input(self, name: str, shape: Shape, axes: Axes, dtype: str = "compute", *, grad: bool = True, shared: bool = False) -> Variable:
        """A tensor that enters the block. `shared`: read by many blocks (rope tables, encoder output), so its maker counts it as saved, not the readers."""
        value = Variable(self._add(name, shape, axes, dtype, "input"), shape, axes, dtype, grad)
        self._inputs.append(value)
        if shared:
            self._unsaved.add(value.tensor_id)
        return value

    def parameter(self, name: str, shape: Shape, axes: Axes, *, trainable: bool | None = None, layout: str = "") -> Variable:
        """A parameter, `name` being its path in the block. Trainable unless the block is frozen. `layout` is noted for the module that owns it."""
        if trainable is None:
            trainable = not self.frozen
        if layout:
            self._layouts[name.rpartition(".")[0]] = layout
        tensor_id = self._add(name, shape, axes, "compute", "parameter", trainable)
        self._unsaved.add(tensor_id)
        value = Variable(tensor_id, shape, axes, "compute", trainable)
        self._parameters.append(value)
        return value

    def layout(self, module: str, style: str) -> None:
        """Note the tensor-parallel style of a module that wraps the one which owns the parameters."""
        self._layouts[module] = style

    def unsplit(self, name: str, why: str) -> None:
        """Note that module or parameter `name` cannot be split as its layout says by cutting module weights contiguously (Block.unsplit)."""
        self._unsplit[name] = why

    def constant(self, name: str, shape: Shape, axes: Axes, dtype: str, *, kind: str = "buffer") -> Variable:
        """A tensor without gradient and without a kernel that makes it here (position ids, masks kept as buffers)."""
        tensor_id = self._add(name, shape, axes, dtype, kind)
        if kind == "buffer":
            self._unsaved.add(tensor_id)
        return Variable(tensor_id, shape, axes, dtype, False)

    # -- forward ---------------------------------------------------------------------------------------------------------------------

    def kernel(
        self,
        module: str,
        op: str,
        name: str,
        inputs: Sequence[Variable],
        outputs: Sequence[tuple[Shape, Axes, str]],
        rule: Callable[..., Sequence[Variable | None]] | None = None,
        *,
        loops: tuple[Loop, ...] = (),
        flops: float = 0.0,
        causal: bool = False,
        sources: Sequence[Variable] = (),
        role: str = "",
    ) -> tuple[Variable, ...]:
        """Append one forward kernel. `rule(*output gradients)` returns one gradient (or None) an input; without a rule nothing flows back.

        `sources` replaces the inputs in the eyes of the rule, for the last kernel of an operation that is differentiated as a whole.

        `name` is the ATen operation. `outputs` are (shape, axes, dtype). Gradients given to a rule may be None for outputs nobody used.
        """
        key = f"{module}/{name}" if module else name
        index = self._counts.get(f"/{key}", 0)
        self._counts[f"/{key}"] = index + 1
        node_id = f"{key}.{index}"
        sources = sources or inputs
        grad = rule is not None and any(value.grad for value in sources)
        made = []
        for position, (shape, axes, dtype) in enumerate(outputs):
            label = node_id if len(outputs) == 1 else f"{node_id}.{position}"
            made.append(
                Variable(
                    self._add(label, shape, axes, dtype, "activation"), shape, axes, dtype, grad and dtype not in ("int64", "int32", "bool")
                )
            )
        self._nodes.append(
            Node(
                node_id=node_id,
                op=op,
                phase="forward",
                inputs=_storages(inputs),
                outputs=tuple(value.tensor_id for value in made),
                loops=loops,
                flops=flops,
                causal=causal,
                module=module,
                role=role,
            )
        )
        if grad and rule is not None:
            self._tape.append(_Entry(tuple(sources), tuple(made), node_id, module, rule))
        return tuple(made)

    def view(self, value: Variable, shape: Shape, axes: Axes, *, module: str = "", clones: bool = False) -> Variable:
        """Another shape of the same storage (view, transpose): no kernel forward; none backward unless the gradient `clones` into a contiguous one."""
        result = Variable(value.tensor_id, shape, axes, value.dtype, value.grad)
        if value.grad:

            def rule(gradient: Variable) -> tuple[Variable]:
                if clones:
                    return (self.back("copy", "clone", [gradient], value),)
                return (Variable(gradient.tensor_id, value.shape, value.axes, gradient.dtype, False),)

            self._tape.append(_Entry((value,), (result,), f"{module}/view" if module else "view", module, rule))
        return result

    def split(self, value: Variable, parts: Sequence[tuple[Shape, Axes]], module: str = "", name: str = "cat") -> tuple[Variable, ...]:
        """Narrow views that together cover a storage (split, chunk, unbind): no kernel forward, one concatenation backward."""
        results = tuple(Variable(value.tensor_id, shape, axes, value.dtype, value.grad) for shape, axes in parts)
        if value.grad:

            def rule(*gradients: Variable | None) -> tuple[Variable]:
                return (self.back("copy", name, [g for g in gradients if g is not None], value),)

            self._tape.append(_Entry((value,), results, f"{module}/split" if module else "split", module, rule))
        return results

    def slices(
        self, value: Variable, parts: Sequence[tuple[Shape, Axes]], module: str = "", name: str = "slice_backward"
    ) -> tuple[Variable, ...]:
        """Narrow views taken one by one (x[..., a:b]): backward pads every gradient to the whole with zeros and adds them up."""
        results = []
        for shape, axes in parts:
            result = Variable(value.tensor_id, shape, axes, value.dtype, value.grad)
            results.append(result)
            if value.grad:

                def rule(gradient: Variable) -> tuple[Variable]:
                    return (self.back("copy", name, [gradient], value),)

                self._tape.append(_Entry((value,), (result,), f"{module}/slice" if module else "slice", module, rule))
        return tuple(results)

    def expand(self, value: Variable, shape: Shape, axes: Axes, module: str = "") -> Variable:
        """A broadcast view: no kernel forward, the sum over what was broadcast backward."""
        result = Variable(value.tensor_id, shape, axes, value.dtype, value.grad)
        if value.grad:

            def rule(gradient: Variable) -> tuple[Variable]:
                return (self.back("reduce", "sum", [gradient], value) if shape != value.shape else gradient,)

            self._tape.append(_Entry((value,), (result,), f"{module}/expand" if module else "expand", module, rule))
        return result

    def pad_view(self, value: Variable, module: str = "") -> Variable:
        """The whole of a storage beside an empty slice of it: backward still pads and adds the empty one's gradient."""
        result = Variable(value.tensor_id, value.shape, value.axes, value.dtype, value.grad)
        if value.grad:

            def rule(gradient: Variable) -> tuple[Variable]:
                empty = self.back("copy", "slice_backward", [gradient], value)
                return (self.back("elementwise", "accumulate", [gradient, empty], value),)

            self._tape.append(_Entry((value,), (result,), f"{module}/slice" if module else "slice", module, rule))
        return result

    # -- backward --------------------------------------------------------------------------------------------------------------------

    def save(self, *values: Variable) -> None:
        """Called by a rule: forward keeps these for it. Parameters and shared inputs belong to others and are not counted."""
        for value in values:
            if value.tensor_id not in self._unsaved:
                self._saved[value.tensor_id] = None

    def back(
        self,
        op: str,
        name: str,
        reads: Sequence[Variable],
        like: Variable,
        *,
        dtype: str = "",
        saved: Sequence[Variable] = (),
        loops: tuple[Loop, ...] = (),
        flops: float = 0.0,
        causal: bool = False,
        also: Sequence[Variable] = (),
    ) -> Variable:
        """Append one backward kernel that reads gradients and `saved` tensors and makes the gradient of `like` (and of `also`, in the same kernel)."""
        return self.back_many(op, name, reads, (like, *also), dtype=dtype, saved=saved, loops=loops, flops=flops, causal=causal)[0]

    def back_many(
        self,
        op: str,
        name: str,
        reads: Sequence[Variable],
        likes: Sequence[Variable],
        *,
        dtype: str = "",
        saved: Sequence[Variable] = (),
        loops: tuple[Loop, ...] = (),
        flops: float = 0.0,
        causal: bool = False,
    ) -> tuple[Variable, ...]:
        """As `back`, for a kernel with several outputs."""
        entry = self._current
        assert entry is not None
        self.save(*saved)
        made = []
        for like in likes:
            kind = dtype or like.dtype
            tensor_id = self._add(f"{like.tensor_id}.grad", like.shape, like.axes, kind, "activation")
            made.append(Variable(tensor_id, like.shape, like.axes, kind, False))
        key = f"{entry.node_id}:{name}"
        index = self._counts.get(f"/{key}", 0)
        self._counts[f"/{key}"] = index + 1
        self._nodes.append(
            Node(
                node_id=f"{key}.{index}",
                op=op,
                phase="backward",
                inputs=_storages([*reads, *saved]),
                outputs=tuple(value.tensor_id for value in made),
                loops=loops,
                flops=flops,
                causal=causal,
                forward_id=entry.node_id,
                module=entry.module,
                role="dgrad" if op in ("gemm", "grouped_gemm", "conv") else "",
            )
        )
        return tuple(made)

    def _delivered(self, value: Variable, gradient: Variable, owned: set[str]) -> Variable:
        """The gradient of a leaf in a tensor of its own.

        A shared input's is added to what the readers behind this block have sent already; one that is another tensor's gradient too is copied.
        """
        if value.tensor_id in self._unsaved and value in self._inputs:
            tensor_id = self._add(f"{value.tensor_id}.grad.others", value.shape, value.axes, value.dtype, "input")
            others = Variable(tensor_id, value.shape, value.axes, value.dtype, False)
            return self.back("elementwise", "accumulate", [others, gradient], value)
        if gradient.tensor_id in owned or self._tensors[gradient.tensor_id].kind == "input":
            return self.back("copy", "clone", [gradient], value)
        return gradient

    def finish(self, kind_id: str, role: str, outputs: Sequence[Variable]) -> Block:
        """Derive the backward pass from the gradients of `outputs` and close the block."""
        gradients: dict[Variable, Variable] = {}
        for value in outputs:
            if value.grad and self._tensors[value.tensor_id].num_elements > 1:
                tensor_id = self._add(f"{value.tensor_id}.grad", value.shape, value.axes, value.dtype, "input")
                gradients[value] = Variable(tensor_id, value.shape, value.axes, value.dtype, False)
        for entry in reversed(self._tape):
            arrived = [gradients.get(value) for value in entry.outputs]
            scalar = any(value.grad and value.shape == () for value in entry.outputs)
            if not scalar and all(gradient is None for gradient in arrived):
                continue
            self._current = entry
            for value, gradient in zip(entry.inputs, entry.rule(*arrived), strict=True):
                if gradient is None or not value.grad:
                    continue
                previous = gradients.get(value)
                gradients[value] = gradient if previous is None else self.back("elementwise", "accumulate", [previous, gradient], value)
        leaves = [value for value in (*self._inputs, *self._parameters) if value in gradients]
        owned: set[str] = set()
        for value in leaves:
            gradients[value] = self._delivered(value, gradients[value], owned)
            owned.add(gradients[value].tensor_id)
        weights = {f"{value.tensor_id}.grad" for value in self._parameters if value in gradients}
        final = {gradients[value].tensor_id: f"{value.tensor_id}.grad" for value in leaves}
        names = {made: wanted for made, wanted in final.items() if made != wanted}
        names |= {wanted: made for made, wanted in names.items()}
        return Block(
            kind_id=kind_id,
            role=role,
            nodes=tuple(_finished(node, names, weights) for node in self._nodes),
            tensors=tuple(replace(t, tensor_id=names[t.tensor_id]) if t.tensor_id in names else t for t in self._tensors.values()),
            inputs=tuple(value.tensor_id for value in self._inputs),
            outputs=tuple(value.tensor_id for value in outputs),
            saved=tuple(self._saved),
            layouts=tuple(sorted(self._layouts.items())),
            unsplit=tuple(sorted(self._unsplit.items())),
        )


def _finished(node: Node, names: dict[str, str], weights: set[str]) -> Node:
    """The node with leaf gradients under their final names and the role of those that make a parameter's gradient."""
    if node.phase == "forward":
        return node
    outputs = tuple(names.get(name, name) for name in node.outputs)
    role = "wgrad" if weights.intersection(outputs) else node.role
    if role == node.role and not any(name in names for name in (*node.inputs, *node.outputs)):
        return node
    return replace(node, inputs=tuple(names.get(name, name) for name in node.inputs), outputs=outputs, role=role)


def _storages(values: Sequence[Variable]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(value.tensor_id for value in values))
