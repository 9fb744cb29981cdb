"""A virtual environment per launcher, made once and kept: under $AUTOPLAN_LAUNCHER_VENVS, or the system's temporary folder.

The launchers cannot share one (their pins conflict), and none may touch the project's own environment.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import subprocess
import sys
import tempfile
from pathlib import Path

TORCH = "torch==2.13.0"
# Each line is one `pip install`. megatron-core asks for Python 3.12 but runs on 3.11 with typing.override from typing_extensions (check_megatron.py).
RECIPES = {
    "torchtitan": ((TORCH,), ("torchtitan==0.3.0", "triton", TORCH)),
    "megatron": (
        (TORCH, "numpy", "packaging", "einops", "triton", "typing_extensions"),
        ("--no-deps", "--ignore-requires-python", "megatron-core==0.19.2"),
    ),
}


class VenvError(Exception):
    """The environment could not be made; the text is the end of pip's output."""


def launcher_python(launcher: str) -> Path:
    """The Python of `launcher`'s environment. Raises VenvError when it cannot be made (no network, no wheel)."""
    recipe = RECIPES[launcher]
    key = hashlib.sha256(repr((recipe, sys.version_info[:2])).encode()).hexdigest()[:8]
    home = Path(os.environ.get("AUTOPLAN_LAUNCHER_VENVS", Path(tempfile.gettempdir()) / f"autoplan-launchers-{os.getuid()}"))
    folder = home / f"{launcher}-{key}"
    home.mkdir(parents=True, exist_ok=True)
    with (home / f"{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "ready").exists():
            _make(folder, recipe)
    return folder / "bin" / "python"


def _make(folder: Path, recipe: tuple[tuple[str, ...], ...]) -> None:
    python = folder / "bin" / "python"
    commands = [[sys.executable, "-m", "venv", "--clear", str(folder)]]
    commands += [[str(python), "-m", "pip", "install", "--quiet", *arguments] for arguments in recipe]
    for command in commands:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise VenvError(f"{' '.join(command[-3:])}: {(done.stderr or done.stdout).strip()[-300:]}")
    (folder / "ready").touch()


if __name__ == "__main__":
    for name in sys.argv[1:] or RECIPES:
        print(launcher_python(name))
