"""The source tree as data: every file of the four packages, parsed once a session."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("costmodel", "planner", "passes", "runtime")


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """One Python file: path from the root, dotted module name, text and syntax tree."""

    path: str
    module: str
    text: str
    tree: ast.Module

    @property
    def package(self) -> str:
        """The top-level package that owns the file."""
        return self.module.split(".")[0]

    def at(self, node: ast.AST) -> str:
        """`path:line` of a node, as an editor understands it."""
        return f"{self.path}:{getattr(node, 'lineno', 1)}"


def _source(path: Path) -> Source:
    relative = path.relative_to(ROOT)
    parts = relative.with_suffix("").parts
    module = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
    text = path.read_text()
    return Source(path=relative.as_posix(), module=module, text=text, tree=ast.parse(text, filename=str(path)))


@pytest.fixture(scope="session")
def root() -> Path:
    return ROOT


@pytest.fixture(scope="session")
def sources() -> tuple[Source, ...]:
    return tuple(_source(path) for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py")))
