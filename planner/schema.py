"""The JSON Schema of plan files, from the same annotations that planner.codec obeys: `python -m planner.schema > docs/plan.schema.json`.

The schema says what the decoder says about types and fields; what must hold between fields (sizes that multiply up, stages that cover the model) is in
planner.consistency and cannot be written as a schema.
"""

from __future__ import annotations

import sys
import types
from dataclasses import fields, is_dataclass
from typing import Any, Union, get_args, get_origin, get_type_hints

from costmodel.estimate import RISKS
from planner.codec import FORMAT, dumps
from planner.plan import FORMAT_VERSION, Plan

DIALECT = "https://json-schema.org/draft/2020-12/schema"


def plan_schema() -> dict[str, Any]:
    """The schema as a JSON document; every dataclass is a definition under its name."""
    definitions: dict[str, Any] = {}
    _schema(Plan, definitions)
    plan = definitions.pop("Plan")
    plan["properties"]["format"] = {"const": FORMAT}
    plan["properties"]["format_version"] = {"const": FORMAT_VERSION}
    plan["properties"]["memory_risk"] = {"enum": list(RISKS)}
    plan["required"] = sorted((*plan["required"], "format", "memory_risk"))
    return {"$schema": DIALECT, "title": "autoplan plan", **plan, "$defs": definitions}


def _schema(kind: Any, definitions: dict[str, Any]) -> dict[str, Any]:
    if is_dataclass(kind) and isinstance(kind, type):
        if kind.__name__ not in definitions:
            definitions[kind.__name__] = {}
            definitions[kind.__name__] = _object(kind, definitions)
        return {"$ref": f"#/$defs/{kind.__name__}"}
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is tuple:
        if len(arguments) == 2 and arguments[1] is Ellipsis:
            return {"type": "array", "items": _schema(arguments[0], definitions)}
        items = [_schema(argument, definitions) for argument in arguments]
        return {"type": "array", "prefixItems": items, "minItems": len(items), "maxItems": len(items)}
    if origin in (Union, types.UnionType):
        return {"anyOf": [_schema(argument, definitions) for argument in arguments]}
    return {"type": {int: "integer", float: "number", bool: "boolean", str: "string", type(None): "null"}[kind]}


def _object(kind: type, definitions: dict[str, Any]) -> dict[str, Any]:
    hints = get_type_hints(kind)
    names = [field.name for field in fields(kind)]
    return {
        "type": "object",
        "properties": {name: _schema(hints[name], definitions) for name in names},
        "required": sorted(names),
        "additionalProperties": False,
        "description": (kind.__doc__ or "").strip().split("\n")[0],
    }


if __name__ == "__main__":
    sys.stdout.write(dumps(plan_schema()))
