"""From what a user types to a ModelSpec: a public name, a path to a config.json (or the folder that holds it), a mapping, or a ModelSpec."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from importlib.resources import files
from pathlib import Path

from costmodel.errors import InputError
from planner.graph import Graph
from planner.models.assemble import Program
from planner.models.config import Config
from planner.models.families import FAMILIES, Family
from planner.models.spec import ModelSpec


def spec_graph(spec: ModelSpec, *, batch: int = 1, sequence: int) -> Graph:
    """The graph that the Hugging Face implementation of `spec` runs for `batch` sequences of `sequence` tokens (images: `sequence` is ignored).

    Raises InputError when the sequence is longer than the model's learned positions, or a number is not a positive whole one.
    """
    for name, value in (("batch", batch), ("sequence", sequence)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise InputError(f"{name} is {value!r}", where=f"spec_graph.{name}", remedy="give a positive whole number")
    if spec.max_sequence and sequence > spec.max_sequence and spec.image is None:
        raise InputError(
            f"sequence {sequence} is longer than the {spec.max_sequence} learned positions of {spec.name}",
            where="sequence",
            remedy=f"use at most {spec.max_sequence}, or a model with rotary positions",
        )
    program = Program(spec, batch, sequence)
    _family(spec.family, spec.name).build(program)
    graph = program.graph()
    if spec.lora_rank and not graph.num_trainable_parameters:
        modules = sorted({name.rpartition(".")[2] for block in graph.kinds for name, style in block.layouts if style != "replicate"})
        raise InputError(
            f"no linear module is called {' or '.join(spec.lora_targets)}",
            where="ModelSpec.lora_targets",
            remedy=f"use some of {', '.join(modules)}",
        )
    return graph


def spec_from_config(config: Mapping[str, object], name: str) -> ModelSpec:
    """Read a Hugging Face config. Raises InputError naming `name` and the key for whatever is missing, contradictory or unknown."""
    if not isinstance(config, Mapping):
        raise InputError(
            f"{type(config).__name__} is not an object", where=name, remedy="give a JSON object with the keys of a config.json"
        )
    model_type = config.get("model_type")
    text = config.get("text_config")
    if isinstance(text, Mapping) and model_type not in {family.model_type for family in FAMILIES}:
        merged = {**{key: config[key] for key in ("tie_word_embeddings",) if key in config}, **text}
        note = f"only the text part of {model_type!r} is planned; its other towers are left out"
        return replace(spec_from_config(merged, f"{name}: text_config"), name=_short(name), notes=(note,))
    if model_type is None:
        known = ", ".join(family.model_type for family in FAMILIES)
        raise InputError("the key is missing", where=f"{name}: model_type", remedy=f"add model_type, one of {known}")
    return _family(model_type, name).read(Config(config, name), _short(name))


def resolve(model: str | os.PathLike[str] | Mapping[str, object] | ModelSpec) -> ModelSpec:
    """The ModelSpec of a built-in name (any common spelling), a config.json, a folder with one, a config mapping, or itself. Raises InputError."""
    if isinstance(model, ModelSpec):
        return model
    if isinstance(model, Mapping):
        return spec_from_config(model, "config")
    if not isinstance(model, (str, os.PathLike)):
        raise InputError(
            f"{type(model).__name__} is not a model", where="model", remedy="give a name, a config.json, a ModelSpec or an nn.Module"
        )
    text = os.fspath(model)
    row = _registry().get(_key(text)) if isinstance(model, str) else None
    if row is not None:
        return spec_from_config(row.config, row.name)
    if not text.strip() or "\0" in text:
        raise InputError(f"{text!r} names no model", where="model", remedy="give a name (`autoplan models`), or the path of a config.json")
    path = Path(text)
    path = path / "config.json" if path.is_dir() else path
    if path.is_file():
        return spec_from_config(_load(path), str(path))
    if path.suffix == ".json" or not isinstance(model, str):
        raise InputError("no such file", where=str(path), remedy="give the path of a config.json or of the folder that holds one")
    raise _unknown(text)


def list_models() -> tuple[str, ...]:
    """Names of the built-in public models, in registry order."""
    return tuple(dict.fromkeys(row.name for row in _registry().values()))


def _family(model_type: object, where: str) -> Family:
    for family in FAMILIES:
        if family.model_type == model_type:
            return family
    known = ", ".join(family.model_type for family in FAMILIES)
    raise InputError(
        f"architecture {model_type!r} is not among the known ones ({known})",
        where=f"{where}: model_type",
        remedy="pass the nn.Module itself: autoplan(model) captures any architecture",
    )


def _short(name: str) -> str:
    """A model's name from the place its config came from: the folder of a config.json, else the name itself."""
    path = Path(name)
    return path.resolve().parent.name if path.name == "config.json" else path.stem if path.suffix == ".json" else name


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    name: str
    config: Mapping[str, object]


def _registry() -> dict[str, _Row]:
    """Rows of registry.json under the key of their name and of every alias."""
    rows = json.loads(files("planner.models").joinpath("registry.json").read_text(encoding="utf-8"))["models"]
    return {_key(label): _Row(name=row["name"], config=row["config"]) for row in rows for label in (row["name"], *row["aliases"])}


def _key(label: str) -> str:
    """A name without organisation, case, punctuation and the suffixes that do not change the shape (-hf, -Instruct, -v0.1, ...)."""
    text = label.rstrip("/").rpartition("/")[2].lower()
    text = re.sub(r"[-_ ](hf|instruct|chat|it|pt|base|preview|\d{4})(?=[-_ ]|$)", "", text)
    return re.sub(r"[^a-z0-9]", "", text).removeprefix("meta")


def _unknown(text: str) -> InputError:
    names = list_models()
    close = get_close_matches(_key(text), [_key(name) for name in names], n=3, cutoff=0.5)
    near = [name for name in names if _key(name) in close]
    remedy = f"Did you mean {', '.join(near)}?" if near else f"Known names: {', '.join(names)}."
    return InputError(
        f"no built-in model is called {text!r} and there is no such file",
        where="model",
        remedy=f"{remedy} A config.json or an nn.Module works too",
    )


def _load(path: Path) -> Mapping[str, object]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot be read ({error})", where=str(path), remedy="check the path and its permissions") from error
    except ValueError as error:
        raise InputError(f"is not JSON ({error})", where=str(path), remedy="give a Hugging Face config.json") from error
    if not isinstance(values, dict):
        raise InputError(f"holds a {type(values).__name__}, not an object", where=str(path), remedy="give a Hugging Face config.json")
    return values
