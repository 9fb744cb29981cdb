"""The published schema is the one the code obeys."""

from __future__ import annotations

import json
from pathlib import Path

from planner.codec import dumps, plan_to_json
from planner.schema import plan_schema
from tests.planner import samples

ROOT = Path(__file__).resolve().parents[2]


def test_published_schema_is_current():
    assert (ROOT / "docs" / "plan.schema.json").read_text() == dumps(plan_schema()), "python -m planner.schema > docs/plan.schema.json"


def test_a_plan_has_exactly_the_fields_of_the_schema():
    schema = plan_schema()
    check(json.loads(plan_to_json(samples.plan())), schema, schema["$defs"])


def check(value, schema, definitions):
    if "$ref" in schema:
        schema = definitions[schema["$ref"].rpartition("/")[2]]
    if "anyOf" in schema:
        return check(value, schema["anyOf"][1 if value is None else 0], definitions)
    if "const" in schema:
        assert value == schema["const"]
        return None
    if "enum" in schema:
        assert value in schema["enum"]
        return None
    kinds = {"object": dict, "array": list, "string": str, "integer": int, "number": float, "boolean": bool, "null": type(None)}
    assert isinstance(value, kinds[schema["type"]])
    if schema["type"] == "object":
        assert sorted(value) == schema["required"] == sorted(schema["properties"])
        for name, part in value.items():
            check(part, schema["properties"][name], definitions)
    if schema["type"] == "array":
        for index, part in enumerate(value):
            check(part, schema["items"] if "items" in schema else schema["prefixItems"][index], definitions)
    return None
