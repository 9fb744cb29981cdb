"""Checkpoints that survive a kill at any moment, and that any plan of the same model and optimizer reads.

    DIRECTORY/step-00000012/checkpoint.json    format, step, and what the user keeps beside (JSON)
    DIRECTORY/step-00000012/.metadata, *.distcp     the tensors of runtime.state, by torch.distributed.checkpoint

All ranks write into a directory of another name; its files are fsynced, then rank 0 renames it and fsyncs the parent. So a directory that is called step-N is
whole, and the newest of them is the one to load. What a killed run left half written is removed by the next save.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from costmodel.errors import InputError
from planner import codec
from runtime.state import Sizes, sizes_of

FORMAT = 1
_NAME = re.compile(r"step-(\d{8,})")


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """Where a run is: optimizer steps done, and what the user wants back (numbers and texts, as JSON has them)."""

    step: int
    extra: Mapping[str, Any] = field(default_factory=dict)


def checkpoints(directory: Path) -> list[tuple[int, Path]]:
    """(step, path) of all whole checkpoints in `directory`, oldest first."""
    entries = directory.iterdir() if directory.is_dir() else ()
    matches = ((_NAME.fullmatch(entry.name), entry) for entry in entries)
    return sorted((int(match[1]), entry) for match, entry in matches if match)


def write(directory: Path, tensors: dict[str, Tensor], position: Position, *, keep: int) -> Path:
    """Save `tensors`, this rank's parts, at `position`; older checkpoints than the last `keep` are removed. Collective.

    Raises InputError when the directory holds a later step: it is another run's.
    """
    newest = max((step for step, _ in checkpoints(directory)), default=-1)
    if newest > position.step:
        remedy = "resume from it, or name another directory"
        raise InputError(f"{directory} holds step {newest}, this run is at {position.step}", where="checkpoint", remedy=remedy)
    final = directory / f"step-{position.step:08d}"
    partial = directory / f".{final.name}.partial"
    main = dist.get_rank() == 0
    dist.barrier()
    if main:
        directory.mkdir(parents=True, exist_ok=True)
        for left in directory.glob(".step-*"):
            shutil.rmtree(left)
        partial.mkdir()
    dist.barrier()
    save(tensors, storage_writer=FileSystemWriter(partial, sync_files=True))
    if main:
        document = {"format": FORMAT, "step": position.step, "extra": dict(position.extra)}
        with (partial / "checkpoint.json").open("w", encoding="utf-8") as file:
            file.write(codec.dumps(document))
            file.flush()
            os.fsync(file.fileno())
        _sync(partial)
        if final.exists():
            final.rename(directory / f".{final.name}.old")
        partial.rename(final)
        _sync(directory)
        _remove_old(directory, keep)
    dist.barrier()
    return final


def find(directory: Path) -> Path:
    """The newest whole checkpoint. Raises InputError when there is none."""
    found = checkpoints(directory)
    if not found:
        raise InputError(f"no checkpoint in {directory}", where="checkpoint", remedy="name the directory that a run saved to")
    return found[-1][1]


def read_position(path: Path) -> Position:
    """Step and extra of the checkpoint at `path`. Raises InputError when it is of another format."""
    where = str(path / "checkpoint.json")
    document: Any = codec.loads(codec.read_text(path / "checkpoint.json"), where)
    if document.get("format") != FORMAT:
        raise InputError(
            f"format is {document.get('format')!r}, this version reads {FORMAT}", where=where, remedy="use the version that wrote it"
        )
    return Position(step=document["step"], extra=document["extra"])


def stored_sizes(path: Path) -> Sizes:
    """Shape and dtype of every tensor of the checkpoint at `path`."""
    return sizes_of(FileSystemReader(path).read_metadata().state_dict_metadata)


def read(path: Path, tensors: dict[str, Tensor]) -> None:
    """Fill `tensors` from the checkpoint at `path`. Collective."""
    with torch.no_grad():
        load(tensors, storage_reader=FileSystemReader(path))


def _remove_old(directory: Path, keep: int) -> None:
    for _, path in checkpoints(directory)[:-keep]:
        path.rename(directory / f".{path.name}.old")
    for left in directory.glob(".step-*"):
        shutil.rmtree(left)


def _sync(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
