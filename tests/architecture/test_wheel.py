"""What `pip install` brings: our four packages whole, and nothing under any other name."""

from __future__ import annotations

import importlib.metadata
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

PACKAGES = ("costmodel", "planner", "passes", "runtime")
DATA_SUFFIXES = (".py", ".yaml", ".json", ".csv", ".typed")


def shipped_files(root: Path) -> set[str]:
    """Every file of the four packages that a user of the wheel needs: all but the pages for readers of the code."""
    files = (path for package in PACKAGES for path in (root / package).rglob("*") if path.is_file())
    return {path.relative_to(root).as_posix() for path in files if "__pycache__" not in path.parts and path.name != "README.md"}


@pytest.fixture(scope="module")
def wheel(root, tmp_path_factory) -> zipfile.ZipFile:
    """The wheel of a copy of the tree, built by the declared backend without network."""
    tree = tmp_path_factory.mktemp("tree")
    for name in (*PACKAGES, "pyproject.toml", "README.md", "LICENSE"):
        source = root / name
        if source.is_dir():
            shutil.copytree(source, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
        elif source.exists():
            shutil.copy(source, tree / name)
    out = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", str(out), str(tree)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = out.glob("*.whl")
    return zipfile.ZipFile(path)


def test_every_package_is_listed(root):
    listed = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    on_disk = {".".join(path.parent.relative_to(root).parts) for package in PACKAGES for path in (root / package).rglob("__init__.py")}
    assert set(listed) == on_disk


def test_every_file_has_a_shipped_suffix(root):
    assert not [name for name in shipped_files(root) if not name.endswith(DATA_SUFFIXES)]


def test_wheel_holds_the_packages_whole(wheel, root):
    assert {name for name in wheel.namelist() if ".dist-info/" not in name} == shipped_files(root)


def test_wheel_owns_four_names_and_one_script(wheel):
    tops = {name.split("/")[0] for name in wheel.namelist()}
    (info,) = (top for top in tops if top.endswith(".dist-info"))
    assert tops == {*PACKAGES, info}
    assert info.startswith("torch_autoplan-")
    entry_points = wheel.read(f"{info}/entry_points.txt").decode()
    assert entry_points.split() == ["[console_scripts]", "autoplan", "=", "planner.cli:main"]


def test_nothing_else_owns_our_names(root):
    owners = importlib.metadata.packages_distributions()
    assert not {name: owners[name] for name in PACKAGES if set(owners.get(name, ())) - {"torch-autoplan"}}


def test_imports_come_from_this_tree(root):
    script = f"import {', '.join(PACKAGES)}; print({', '.join(f'{name}.__file__' for name in PACKAGES)}, sep='\\n')"
    done = subprocess.run([sys.executable, "-c", script], cwd=root, capture_output=True, text=True, check=True)
    assert [Path(line).parent.parent for line in done.stdout.split()] == [root] * len(PACKAGES)
