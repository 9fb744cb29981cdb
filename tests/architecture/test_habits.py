"""Habits that keep the house clean: sizes, no globals, nothing that executes data, no trace of the machine that wrote it."""

from __future__ import annotations

import ast
import re

MAX_FILE_LINES = 450
MAX_FUNCTION_LINES = 60
TEXT_SUFFIXES = {".py", ".md", ".toml", ".yaml", ".yml", ".json", ".jsonl", ".csv", ".sh", ".txt", ".cfg", ""}
SKIPPED_FOLDERS = {"build", "dist", "out", "__pycache__"}
MACHINE_PATH = re.compile(r"(?<![\w.])/(work|root|home|Users)/\w")
EXECUTES_DATA = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def calls(tree):
    return [(ast.unparse(node.func), node) for node in ast.walk(tree) if isinstance(node, ast.Call)]


def test_files_stay_small(sources):
    sizes = {source.path: source.text.count("\n") for source in sources}
    assert not {path: lines for path, lines in sizes.items() if lines > MAX_FILE_LINES}


def test_functions_stay_small(sources):
    bad = []
    for source in sources:
        functions = [node for node in ast.walk(source.tree) if isinstance(node, FUNCTIONS)]
        sizes = [(node, node.end_lineno - node.lineno + 1) for node in functions]
        bad += [f"{source.at(node)}: {node.name} has {lines} lines" for node, lines in sizes if lines > MAX_FUNCTION_LINES]
    assert not bad


def test_nothing_executes_data(sources):
    bad = []
    for source in sources:
        for node in ast.walk(source.tree):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            bad += [f"{source.at(node)}: {name}" for name in names if name.split(".")[0] in EXECUTES_DATA]
        for name, node in calls(source.tree):
            keywords = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
            unsafe_load = name == "torch.load" and keywords.get("weights_only") != "True"
            if name in ("eval", "exec", "compile", "yaml.load", "yaml.unsafe_load", "os.system") or unsafe_load:
                bad.append(f"{source.at(node)}: {name}")
            if keywords.get("shell") == "True":
                bad.append(f"{source.at(node)}: shell=True")
    assert not bad


def test_no_global_state(sources):
    bad = []
    for source in sources:
        for node in ast.walk(source.tree):
            if isinstance(node, ast.Global):
                bad.append(f"{source.at(node)}: global {', '.join(node.names)}")
            if isinstance(node, FUNCTIONS):
                caches = [text for text in map(ast.unparse, node.decorator_list) if re.match(r"(functools\.)?(lru_)?cache\b", text)]
                bad += [f"{source.at(node)}: {text} on {node.name}" for text in caches]
        for node in source.tree.body:
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.List | ast.Dict | ast.Set | ast.ListComp | ast.DictComp):
                bad += [f"{source.at(node)}: {ast.unparse(name)}" for name in node.targets if not _is_constant(ast.unparse(name))]
    assert not bad


def _is_constant(name: str) -> bool:
    return name == "__all__" or name.strip("_").isupper()


def test_environment_is_read_at_the_rim_only(sources):
    bad = []
    for source in sources:
        if source.package in ("costmodel", "planner", "passes") and not source.path.startswith("planner/cli"):
            reads = [node for node in ast.walk(source.tree) if isinstance(node, ast.Attribute)]
            bad += [source.at(node) for node in reads if ast.unparse(node) in ("os.environ", "os.getenv")]
    assert not bad


def test_nothing_is_left_for_later(sources):
    marks = re.compile(r"\b(TODO|FIXME|XXX|HACK)\b|raise NotImplementedError")
    bad = [f"{source.path}: {match.group()}" for source in sources if (match := marks.search(source.text))]
    assert not bad


def test_no_file_names_the_machine_that_wrote_it(root):
    bad = []
    for path in sorted(root.rglob("*")):
        relative = path.relative_to(root)
        hidden = any(part.startswith(".") or part in SKIPPED_FOLDERS or part.endswith(".egg-info") for part in relative.parts)
        if hidden or not path.is_file() or path.suffix not in TEXT_SUFFIXES:
            continue
        match = MACHINE_PATH.search(path.read_text(errors="replace"))
        if match:
            bad.append(f"{relative}: {match.group()}")
    assert not bad
