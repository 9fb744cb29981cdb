"""Program: collects blocks while a family writes its model, keeps equal kinds once, and closes them into a Graph."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from planner.graph import Block, Graph, Layer, Tensor
from planner.models.builder import BlockBuilder, Variable
from planner.models.spec import ModelSpec


class Program:
    """One model being written for micro-batches of `batch` sequences of `sequence` tokens."""

    def __init__(self, spec: ModelSpec, batch: int, sequence: int) -> None:
        self.spec, self.batch, self.sequence = spec, batch, sequence
        self._kinds: dict[str, tuple[Block, bool]] = {}
        self._layers: list[Layer] = []
        self._tied: list[tuple[str, str]] = []

    def block(self, kind_id: str, role: str, path: str, write: Callable[..., Sequence[Variable]], *choices: object) -> bool:
        """Append a block; `write(builder, program, *choices)` is called once for every `kind_id`. Returns whether its first output needs a gradient."""
        if kind_id not in self._kinds:
            builder = BlockBuilder(lora=(self.spec.lora_rank, self.spec.lora_targets), frozen=self.spec.frozen)
            outputs = write(builder, self, *choices)
            self._kinds[kind_id] = builder.finish(kind_id, role, outputs), outputs[0].grad
        self._layers.append(Layer(path=path or kind_id, kind_id=kind_id))
        return self._kinds[kind_id][1]

    def tie(self, owner: str, user: str) -> None:
        """`user` is the same storage as `owner`."""
        self._tied.append((owner, user))

    def ids(self, b: BlockBuilder, name: str = "input_ids") -> Variable:
        """Token ids entering the model."""
        return b.input(name, (self.batch, self.sequence), ("batch", "sequence"), "int64", grad=False)

    def labels(self, b: BlockBuilder) -> Variable:
        """Token labels entering the head."""
        return self.ids(b, "labels")

    def hidden(self, b: BlockBuilder, grad: bool, name: str = "hidden_states", *, shared: bool = False) -> Variable:
        """The hidden states a block takes from the one before it (`shared`: from one that many read)."""
        image = self.spec.image
        sequence = self.sequence if image is None else image.num_patches + 1
        return b.input(name, (self.batch, sequence, self.spec.hidden), ("batch", "sequence", ""), grad=grad, shared=shared)

    def tables(self, b: BlockBuilder, kind: str = "") -> tuple[Variable, ...]:
        """The rotary tables made in the embedding block: cos and sin, or one complex table (as fp32 pairs)."""
        spec = self.spec
        width = spec.rope_dim // 2 if spec.rope == "chunks" else spec.rope_dim
        names = ("turns",) if spec.rope == "complex" else ("cos", "sin")
        return tuple(
            b.input(f"{name}{kind}", (1, self.sequence, width), ("", "sequence", ""), spec.rope_dtype, grad=False, shared=True)
            for name in names
        )

    @property
    def num_masks(self) -> int:
        """Additive masks that eager attention reads: one for all layers, or one for sliding and one for full ones."""
        spec = self.spec
        kinds = {spec.slides(index) for index in range(spec.num_layers)}
        return len(kinds) if spec.attention == "eager" else 0

    def mask(self, b: BlockBuilder, kind: str = "") -> Variable:
        """One of those masks."""
        length = self.sequence
        return b.input(f"mask{kind}", (self.batch, 1, length, length), ("batch", "", "sequence", ""), grad=False, shared=True)

    def graph(self) -> Graph:
        """The finished graph; counts are those of distinct parameters (a tied one counts once)."""
        spec = self.spec
        kinds = {kind_id: block for kind_id, (block, _) in self._kinds.items()}
        shared = {user for _, user in self._tied}
        repeats = Counter(layer.kind_id for layer in self._layers)
        sizes = [
            (tensor, tensor.num_elements * repeats[block.kind_id])
            for block in kinds.values()
            for tensor in block.parameters
            if block.role == "layer" or tensor.tensor_id not in shared
        ]
        total = sum(size for _, size in sizes)
        experts = spec.experts
        return Graph(
            name=spec.name,
            batch=self.batch,
            sequence=self.sequence,
            kinds=tuple(kinds.values()),
            layers=tuple(self._layers),
            tied=tuple(self._tied),
            num_parameters=total,
            num_trainable_parameters=sum(size for tensor, size in sizes if tensor.trainable),
            num_active_parameters=sum(_active(tensor, size, spec) for tensor, size in sizes),
            num_experts=experts.num_experts if experts else 0,
            top_k=experts.top_k if experts else 0,
            num_heads=spec.heads,
            num_kv_heads=spec.kv_heads,
            vocab_size=spec.vocab,
            notes=(*spec.notes, *self._windows()),
        )

    def _windows(self) -> tuple[str, ...]:
        """The note that belongs to windows shorter than the sequence."""
        spec = self.spec
        if spec.attention != "flash" or not 0 < spec.window < self.sequence:
            return ()
        return (f"layers that slide see {spec.window} keys: priced as a flash kernel that skips the others (flash-attn, FlexAttention)",)


def _active(tensor: Tensor, size: int, spec: ModelSpec) -> int:
    """Parameters that one token meets: top_k of the num_experts experts."""
    if spec.experts is None or tensor.axes[:1] != ("experts",):
        return size
    return size * spec.experts.top_k // spec.experts.num_experts
