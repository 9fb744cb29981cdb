"""What an exporter returns, and how it reaches the disk."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from costmodel.errors import InputError
from planner.codec import write_atomic


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """One thing the launcher cannot carry: the plan's `field` says `says`, the launcher does `launcher_does` instead."""

    field: str
    says: str
    launcher_does: str

    def __str__(self) -> str:
        return f"{self.field} = {self.says}: {self.launcher_does}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """Files for one launcher as (name, text), what they lose of the plan, and the command that starts the run from their folder."""

    target: str
    files: tuple[tuple[str, str], ...]
    losses: tuple[Loss, ...]
    command: str

    def text(self, name: str) -> str:
        """The text of file `name`. Raises KeyError."""
        return dict(self.files)[name]


def write_exported(exported: Exported, directory: str | Path) -> tuple[Path, ...]:
    """Write every file into `directory` (made if absent) and return the paths. Shell scripts are made executable.

    Each file appears whole or not at all (see planner.codec.write_atomic). Raises InputError when the directory cannot be written.
    """
    folder = Path(directory)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"cannot make the folder ({error.strerror})", where=str(folder), remedy="choose another one") from None
    paths = tuple(folder / name for name, _ in exported.files)
    for path, (_, text) in zip(paths, exported.files, strict=True):
        write_atomic(path, text)
        if path.suffix == ".sh":
            path.chmod(0o755)
    return paths
