"""Imports go one way: costmodel <- planner <- passes <- runtime, and nothing below the line needs torch."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from fnmatch import fnmatch

ALLOWED = {
    "costmodel": {"costmodel"},
    "planner": {"costmodel", "planner"},
    "passes": {"costmodel", "planner", "passes"},
    "runtime": {"costmodel", "planner", "passes", "runtime"},
}
OURS = set(ALLOWED)
TORCH = {"torch", "torchvision", "transformers"}


def imports(tree: ast.AST) -> Iterator[tuple[str, ast.stmt]]:
    """Every absolute module name that the tree imports, with its statement."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative import"
            yield node.module or "", node


def inside_functions(tree: ast.Module) -> set[ast.stmt]:
    """Statements that run only when a function is called."""
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    return {child for function in functions for child in ast.walk(function) if isinstance(child, ast.stmt) and child is not function}


def type_checking_only(tree: ast.Module) -> set[ast.stmt]:
    """Statements under `if TYPE_CHECKING:`, which never run."""
    guards = [node for node in ast.walk(tree) if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)]
    return {child for guard in guards for child in ast.walk(guard) if isinstance(child, ast.stmt)}


def is_cli(path: str) -> bool:
    return fnmatch(path, "planner/cli*.py") or fnmatch(path, "planner/cli/*.py")


def is_capture(path: str) -> bool:
    return fnmatch(path, "planner/capture*.py") or fnmatch(path, "planner/capture/*.py")


def test_no_relative_imports(sources):
    bad = [source.at(node) for source in sources for node in ast.walk(source.tree) if isinstance(node, ast.ImportFrom) and node.level]
    assert not bad


def test_imports_go_one_way(sources):
    bad = []
    for source in sources:
        lazy = inside_functions(source.tree)
        for name, node in imports(source.tree):
            top = name.split(".")[0]
            if top not in OURS or top in ALLOWED[source.package] or (is_cli(source.path) and node in lazy):
                continue
            bad.append(f"{source.at(node)}: {source.package} imports {name}")
    assert not bad


def test_torch_stays_above_the_line(sources):
    bad = []
    for source in sources:
        if source.package not in ("costmodel", "planner") or is_capture(source.path):
            continue
        lazy, typing_only = inside_functions(source.tree), type_checking_only(source.tree)
        for name, node in imports(source.tree):
            if name.split(".")[0] not in TORCH or node in typing_only or (is_cli(source.path) and node in lazy):
                continue
            bad.append(f"{source.at(node)}: imports {name}")
    assert not bad


def test_capture_is_imported_lazily(sources):
    bad = []
    for source in sources:
        if source.package not in ("costmodel", "planner") or is_capture(source.path):
            continue
        allowed = inside_functions(source.tree) | type_checking_only(source.tree)
        bad += [
            f"{source.at(node)}: imports {name}"
            for name, node in imports(source.tree)
            if name.startswith("planner.capture") and node not in allowed
        ]
    assert not bad


def test_importing_the_core_loads_no_torch(sources, root):
    modules = [source.module for source in sources if source.package in ("costmodel", "planner") and not is_capture(source.path)]
    script = f"import importlib, sys\nfor name in {modules!r}: importlib.import_module(name)\nprint(sorted({TORCH!r} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", script], cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


def test_planning_and_exporting_load_no_torch(root):
    """The whole way from a name to exported files, in a process of its own."""
    script = """
import sys
from costmodel.mesh import Mesh
from planner.codec import plan_from_json, plan_to_json
from planner.export import export
from planner.facade import plan_for
from planner.job import Job
from planner.strategy import Strategy
strategy = Strategy(mesh=Mesh(dp_shard=8), zero_stage=3)
plan = plan_for("llama3-8b", "8xH100", Job(global_batch=8, seq_len=4096), strategy, "torchtitan")
assert export(plan_from_json(plan_to_json(plan)), "torchtitan").losses == ()
print("torch" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "False"


def test_no_module_shadows_the_standard_library(root):
    tops = {path.stem for path in root.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    assert not tops & sys.stdlib_module_names


def test_modules_run_as_scripts_shadow_nothing(sources):
    """A file run directly puts its own folder first on sys.path: a sibling called like a standard module would be imported instead."""
    runnable = {source.path.rsplit("/", 1)[0] for source in sources if '__name__ == "__main__"' in source.text}
    siblings = [source for source in sources if source.path.rsplit("/", 1)[0] in runnable]
    bad = [source.path for source in siblings if source.path.rsplit("/", 1)[1].removesuffix(".py") in sys.stdlib_module_names]
    assert not bad
