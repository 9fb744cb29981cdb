"""The blocks outside the repeated ones, cut from one trace: embedding, seams, head."""

from __future__ import annotations

from collections.abc import Iterator

from planner.capture_axes import Axes
from planner.capture_blocks import BlockWriter, Scale
from planner.capture_ledger import Ledger
from planner.capture_rest import Rest
from planner.capture_roles import Roles
from planner.capture_trace import Strided
from planner.graph import Block


def write_segments(rest: Rest, num_blocks: int, axes: Axes, roles: Roles, scale: Scale, ledger: Ledger) -> dict[int, Block]:
    """Blocks by the index of the block call before which they run. A seam without parameters of its own joins the segment before it."""
    trace = rest.trace
    joined = _joined(rest, num_blocks)
    owner = [joined[segment] for segment in rest.segment_of]
    blocks: dict[int, Block] = {}
    counted: set[int] = set()
    for segment in sorted(set(owner)):
        members = [index for index, found in enumerate(owner) if found == segment]
        if not any(trace.records[index].kernel for index in members) and segment != num_blocks:
            continue
        role = "layer" if num_blocks == 0 else "head" if segment == num_blocks else "embedding"
        kind_id = {"layer": "model", "head": "head", "embedding": "embed"}[role] + (f"#{segment}" if 0 < segment < num_blocks else "")
        orphans = [value for after, values in ledger.orphans.items() if joined[after] == segment for value in values]
        writer = BlockWriter(trace, axes, roles, scale)
        part = _Segment(rest, members, writer, ledger, orphans=orphans, counted=frozenset(counted), last=segment == num_blocks)
        blocks[segment] = part.write(kind_id, role)
        counted.update(part.kept)
    return blocks


def _joined(rest: Rest, num_blocks: int) -> list[int]:
    """The segment that each segment becomes part of."""
    storages = {value.storage for value in rest.trace.parameters.values()}
    keeps = {0, num_blocks}
    for record, segment in zip(rest.trace.records, rest.segment_of, strict=True):
        if record.phase == "forward" and any(value.storage in storages for value in record.inputs):
            keeps.add(segment)
    joined, current = [], 0
    for segment in range(num_blocks + 1):
        current = segment if segment in keeps else current
        joined.append(current)
    return joined


class _Segment:
    """One segment being written: what it takes from outside gets a name when it is first read."""

    def __init__(
        self,
        rest: Rest,
        members: list[int],
        writer: BlockWriter,
        ledger: Ledger,
        *,
        orphans: list[Strided],
        counted: frozenset[int],
        last: bool,
    ) -> None:
        self._trace, self._members, self._writer, self._readers, self._last = rest.trace, members, writer, ledger.readers, last
        self._orphans, self._counted = orphans, counted
        self.kept: list[int] = []
        self._inputs: list[str] = []
        self._anywhere = {v.storage for record in self._trace.records if not record.view for v in record.outputs}
        self._made = {v.storage for i in members if not self._trace.records[i].view for v in self._trace.records[i].outputs if self._own(i)}

    def _own(self, index: int) -> bool:
        return not self._trace.records[index].op.startswith("block")

    def _phase(self, phase: str) -> Iterator[int]:
        return (index for index in self._members if self._trace.records[index].phase == phase and self._own(index))

    def write(self, kind_id: str, role: str) -> Block:
        """The block."""
        writer, trace = self._writer, self._trace
        self._declare_parameters()
        for index in self._phase("forward"):
            self._declare(index)
            writer.add(index)
        outputs = self._outputs()
        saved = self._saved()
        writer.expect_gradients(trace.grads.items())
        writer.expect_gradients(self._leaving())
        arriving = self._arriving()
        for index in self._phase("backward"):
            for value in trace.records[index].inputs:
                if writer.name(value.storage) is None and value.storage in arriving and value.storage not in self._made:
                    writer.tensor(value, self._free(f"{arriving[value.storage]}.grad"), "input")
            writer.add(index)
        return writer.block(kind_id, role, inputs=self._inputs, outputs=outputs, saved=saved)

    def _free(self, name: str) -> str:
        while name in self._writer.tensors:
            name += "'"
        return name

    def _declare_parameters(self) -> None:
        """Parameters read here under the name whose module reads them; the last segment also takes those that nothing reads."""
        trace = self._trace
        modules: dict[int, set[str]] = {}
        for index in self._phase("forward"):
            for value in trace.records[index].inputs:
                modules.setdefault(value.storage, set()).add(trace.records[index].module)
        everywhere = {value.storage for record in trace.records for value in record.inputs}
        for storage in dict.fromkeys(value.storage for value in trace.parameters.values()):
            names = [name for name, value in trace.parameters.items() if value.storage == storage]
            if storage in modules:
                near = [name for name in names if name.rpartition(".")[0] in modules[storage]]
                self._parameter((near or names)[0])
            elif self._last and storage not in everywhere:
                self._parameter(names[0])

    def _parameter(self, name: str) -> None:
        value = self._trace.parameters[name]
        self._writer.tensor(value, name, "parameter", trainable=name in self._trace.trainable or bool(self._trainable_twin(value)))

    def _trainable_twin(self, value: Strided) -> list[str]:
        return [name for name in self._trace.trainable if self._trace.parameters[name].storage == value.storage]

    def _declare(self, index: int) -> None:
        """Name what record `index` reads from outside the segment."""
        for value in self._trace.records[index].inputs:
            if self._writer.name(value.storage) is not None or value.storage in self._made:
                continue
            buffer = next((name for name, known in self._trace.buffers.items() if known.storage == value.storage), None)
            if buffer is not None:
                self._writer.tensor(value, buffer, "buffer")
                continue
            given = next((name for name, known in self._trace.inputs.items() if known.storage == value.storage), None)
            if given is None and value.storage not in self._anywhere:
                self._writer.tensor(value, self._free("constant"), "buffer")
                continue
            self._take(value, given or "hidden_states")

    def _take(self, value: Strided, name: str) -> None:
        self._inputs.append(self._writer.tensor(value, self._free(name), "input"))

    def _outputs(self) -> list[str]:
        """What later segments, blocks or the caller read."""
        members = set(self._members)
        read = {value.storage for value in self._trace.outputs}
        for index, record in enumerate(self._trace.records):
            if record.phase == "forward" and (index not in members or record.op == "block"):
                read.update(value.storage for value in record.inputs)
        return [name for storage in dict.fromkeys(self._storages()) if storage in read and (name := self._writer.name(storage))]

    def _storages(self) -> Iterator[int]:
        for index in self._phase("forward"):
            if not self._trace.records[index].view:
                yield from (value.storage for value in self._trace.records[index].outputs)

    def _saved(self) -> list[str]:
        """What autograd keeps here and no block or earlier segment counts, and what this segment counts for several blocks."""
        found = []
        made = set(self._storages())
        for value in self._orphans:
            if self._writer.name(value.storage) is None:
                self._take(value, "hidden_states")
        shared = [storage for storage, count in self._readers.items() if count > 1 and storage in made]
        for storage in dict.fromkeys((*self._trace.saved, *shared, *(value.storage for value in self._orphans))):
            name = self._writer.name(storage)
            mine = name is not None and self._writer.tensors[name].kind in ("activation", "input") and storage not in self._counted
            if name is not None and mine and not (storage in made and self._readers[storage] == 1):
                found.append(name)
                self.kept.append(storage)
        return found

    def _leaving(self) -> list[tuple[str, Strided]]:
        """Gradients that this segment hands to the block before it, under the names of what they are gradients of."""
        found = []
        for record in self._trace.records:
            if record.op == "block_backward":
                for grad, value in zip(record.args[0], record.args[2], strict=False):
                    if name := self._writer.name(value.storage):
                        found.append((name, grad))
        return found

    def _arriving(self) -> dict[int, str]:
        """Gradients made by blocks, by storage: the name of what they are gradients of."""
        arriving: dict[int, str] = {}
        for value, grad in self._trace.grad_outputs:
            arriving[grad.storage] = self._writer.name(value.storage) or "loss"
        for record in self._trace.records:
            if record.op == "block_backward":
                values = record.args[2][len(record.args[0]) :]
                arriving |= {
                    g.storage: self._writer.name(v.storage) or "hidden_states" for g, v in zip(record.outputs, values, strict=True)
                }
        return arriving
