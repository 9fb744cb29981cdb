"""Placements: what is silent in torch is an error here, and what cannot be right is refused before anything changes."""

from __future__ import annotations

import pytest

from costmodel.errors import InputError
from examples.gpt import GPTConfig, build_model
from passes.placements import resolve_layouts
from tests.runtime.plans import GPT_LAYOUTS

CASE = "tests.passes.cases:refusal"


def test_layouts_resolve_by_index():
    model = build_model(GPTConfig(num_layers=12))
    found = resolve_layouts(model, GPT_LAYOUTS)
    assert found["blocks.11.mlp.up_proj"] == "column"
    assert sum(style == "row" for style in found.values()) == 24
    assert "blocks.0.dropout" not in found


@pytest.mark.parametrize(
    ("layouts", "what"),
    [
        ((("blocks.*.mlp.gate", "column"),), "matches no module"),
        ((("embed", "diagonal"),), "use one of"),
        ((("blocks.0x", "row"),), "matches no"),
    ],
)
def test_layouts_that_cannot_be(layouts, what):
    with pytest.raises(InputError, match=what):
        resolve_layouts(build_model(GPTConfig()), layouts)


@pytest.mark.dist
@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("recompute first", "already recomputes"),
        ("twice", "already sharded"),
        ("uneven", "is not a multiple of tp 2"),
        ("no layouts", "no module has a layout"),
        ("uncovered", "has no layout"),
        ("narrow norm", "heads only"),
        ("fused", "is off by"),
        ("untied", "placed differently"),
        ("vocab in a block", "inside a block"),
        ("embedding as row", "shards nn.Linear and nn.Embedding only"),
    ],
)
def test_refused(pool, name, what):
    for message in pool.run(CASE, ranks=2, name=name):
        assert what in message


@pytest.mark.dist
def test_bytes_shrink_and_ties_stay(pool):
    for result in pool.run("tests.passes.cases:sharded_bytes", ranks=2):
        assert result["local"] < 0.6 * result["whole"]
        assert result["tied"]
