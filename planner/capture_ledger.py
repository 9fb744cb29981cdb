"""Who counts a saved tensor that crosses a border, so that the sum over all blocks is what autograd keeps, each storage once.

One reader: it counts its own input. Several readers (rotary tables, masks, an encoder's output): the maker does. No reader: the maker does, when its own
backward needs it. Where the layers of one kind differ in this (the last encoder layer feeds every decoder layer), the segment after the layer counts instead.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from planner.capture_rest import Rest, inputs_of
from planner.capture_survey import BlockCall
from planner.capture_trace import Record, Strided, Trace


@dataclass(frozen=True, slots=True, kw_only=True)
class Ledger:
    """`readers`: block calls that keep a storage of the outer trace. By signature: `unsaved` input names, left to others, and `kept` output positions.

    `orphans`: values that the segment of that number counts.
    """

    readers: Counter[int]
    unsaved: dict[int, frozenset[str]]
    kept: dict[int, frozenset[int]]
    orphans: dict[int, tuple[Strided, ...]]


def open_ledger(calls: list[BlockCall], rest: Rest, traces: Mapping[int, Trace]) -> Ledger:
    """The ledger of a model."""
    readers: Counter[int] = Counter()
    marks: dict[int, list[Record]] = {}
    for call, mark in zip(calls, rest.marks, strict=True):
        trace = traces[call.signature]
        kept = set(trace.saved)
        readers.update(outer.storage for outer, inner in zip(inputs_of(mark), trace.inputs.values(), strict=True) if inner.storage in kept)
        marks.setdefault(call.signature, []).append(mark)
    outside = set(rest.trace.saved)

    def counts(trace: Trace, mark: Record, place: int) -> bool:
        storage = mark.outputs[place].storage
        own = trace.outputs[place].storage in trace.saved
        return readers[storage] > 1 or (own and not readers[storage] and storage not in outside)

    made = {
        signature: frozenset(
            place for place in range(len(traces[signature].outputs)) if all(counts(traces[signature], mark, place) for mark in found)
        )
        for signature, found in marks.items()
    }
    orphans: dict[int, list[Strided]] = {}
    for index, (call, mark) in enumerate(zip(calls, rest.marks, strict=True)):
        for place, value in enumerate(mark.outputs):
            if place not in made[call.signature] and counts(traces[call.signature], mark, place):
                orphans.setdefault(index + 1, []).append(value)
    return Ledger(
        readers=readers,
        unsaved={
            signature: frozenset(
                name
                for place, name in enumerate(traces[signature].inputs)
                if all(readers[inputs_of(mark)[place].storage] > 1 for mark in found)
            )
            for signature, found in marks.items()
        },
        kept=made,
        orphans={segment: tuple(values) for segment, values in orphans.items()},
    )
