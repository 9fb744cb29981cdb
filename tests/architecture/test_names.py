"""Names tell the truth: units in suffixes, one owner a name, a docstring for everything public."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator

PREFIXED_UNIT = re.compile(r"_(ms|us|ns|kb|mb|gb|tb|kib|mib|gib|tib|gbps|gflops?|tflops?|pflops?|mhz|ghz|pct|percent)$", re.IGNORECASE)
UNIT = re.compile(r"(^|_)(s|watts|bytes|frac|flops|per_[a-z_]+)$")
# Floats without a unit: counts that sharding makes fractional, and amounts whose unit the holding field names.
UNITLESS = {
    "ParameterShard.dense", "ParameterShard.expert", "ParameterShard.frozen_dense", "ParameterShard.frozen_expert",
    "StepWork.tied_embedding_params", "StageMemory.in_flight", "Line.amount", "Job.dropout", "Report.losses",
    "GemmConstants.overlap",
}  # fmt: skip
DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def identifiers(tree: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """Names the file defines: functions, classes, arguments, assigned variables and fields."""
    for node in ast.walk(tree):
        if isinstance(node, (*DEFINITIONS, ast.ClassDef)):
            yield node.name, node
        elif isinstance(node, ast.arg):
            yield node.arg, node
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id, node


def decorators(node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    return [ast.unparse(item) for item in node.decorator_list]


def dataclasses(tree: ast.Module) -> Iterator[tuple[ast.ClassDef, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            for text in decorators(node):
                if text.split("(")[0] in ("dataclass", "dataclasses.dataclass"):
                    yield node, text


def test_prefixed_units_only_at_the_rim(sources):
    bad = [
        f"{source.at(node)}: {name}"
        for source in sources
        if source.path != "costmodel/units.py" and not source.path.startswith("costmodel/catalog/")
        for name, node in identifiers(source.tree)
        if PREFIXED_UNIT.search(name)
    ]
    assert not bad


def test_float_fields_carry_their_unit(sources):
    bad = []
    for source in sources:
        for node, _ in dataclasses(source.tree):
            for item in node.body:
                if not isinstance(item, ast.AnnAssign) or not isinstance(item.target, ast.Name):
                    continue
                name = item.target.id
                is_float = re.search(r"\bfloat\b", ast.unparse(item.annotation)) and "tuple[tuple" not in ast.unparse(item.annotation)
                if is_float and not UNIT.search(name) and f"{node.name}.{name}" not in UNITLESS:
                    bad.append(f"{source.at(item)}: {node.name}.{name}")
    assert not bad


def test_values_are_frozen_slotted_keyword_only(sources):
    bad = []
    for source in sources:
        if source.package in ("costmodel", "planner"):
            for node, text in dataclasses(source.tree):
                if node.name.startswith("_"):
                    continue
                missing = [flag for flag in ("frozen=True", "slots=True", "kw_only=True") if flag not in text]
                if missing:
                    bad.append(f"{source.at(node)}: {node.name} lacks {', '.join(missing)}")
    assert not bad


def test_every_public_name_has_a_docstring(sources):
    bad = [source.path for source in sources if source.tree.body and not ast.get_docstring(source.tree)]
    for source in sources:
        scopes = [source.tree, *(node for node in source.tree.body if isinstance(node, ast.ClassDef) and not node.name.startswith("_"))]
        for scope in scopes:
            for node in scope.body:
                if not isinstance(node, (*DEFINITIONS, ast.ClassDef)) or node.name.startswith("_") or "overload" in decorators(node):
                    continue
                if not ast.get_docstring(node):
                    bad.append(f"{source.at(node)}: {node.name}")
    assert not bad


def test_public_classes_have_one_owner(sources):
    """A type's name says which type is meant; functions are read with their module (`decoder.build`, `gpt2.build`)."""
    owners = defaultdict(list)
    for source in sources:
        for node in source.tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                owners[node.name].append(source.at(node))
    assert not {name: places for name, places in owners.items() if len(places) > 1}


def test_no_drawer_for_everything(sources):
    drawers = {"utils", "util", "helpers", "common", "misc"}
    assert not [source.path for source in sources if source.module.rsplit(".", 1)[-1] in drawers]
