"""Canonical JSON for plans: one generic encoder and one strict decoder, both driven by dataclass annotations.

The text is a function of the value alone: keys sorted, floats by repr, two-space indent, newline at the end; no clock, host or path. Every field is
written and every field is required, so a file that lost a line is refused rather than completed with a default. Decoding stops at the first
fault with its place (`plan.json: strategy.mesh.tp`). A field annotated float accepts 3 and writes 3.0; nothing else is converted.
"""

from __future__ import annotations

import json
import math
import os
import tempfile
import types
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from costmodel.errors import InputError
from planner.plan import FORMAT_VERSION, Plan

FORMAT = "autoplan/plan"
T = TypeVar("T")


def encode(value: Any, kind: Any) -> Any:
    """`value`, annotated as `kind`, as plain JSON values. Raises TypeError for a value that its annotation does not allow (a bug)."""
    if is_dataclass(kind) and isinstance(kind, type):
        hints = get_type_hints(kind)
        return {field.name: encode(getattr(value, field.name), hints[field.name]) for field in fields(kind)}
    origin = get_origin(kind)
    if origin is tuple:
        kinds = _element_kinds(kind, len(value))
        return [encode(item, element) for item, element in zip(value, kinds, strict=True)]
    if origin in (Union, types.UnionType):
        return None if value is None else encode(value, _not_none(kind))
    if kind is float:
        number = float(value)
        if not math.isfinite(number):
            raise TypeError(f"{value!r} cannot be written")
        return number
    if kind in (int, bool, str):
        return kind(value)
    raise TypeError(f"no JSON form for {kind!r}")


def decode(data: Any, kind: type[T], where: str) -> T:
    """`data` (what json.loads returns) as a `kind`. Raises InputError naming the place, `where` followed by the field path."""
    result: T = _decode(data, kind, where, "")
    return result


def _decode(data: Any, kind: Any, file: str, path: str) -> Any:
    if is_dataclass(kind) and isinstance(kind, type):
        return _decode_fields(data, kind, file, path)
    origin = get_origin(kind)
    if origin is tuple:
        _expect(isinstance(data, list), data, "a list", file, path)
        kinds = _element_kinds(kind, len(data))
        _expect(len(kinds) == len(data), data, f"a list of {len(kinds)}", file, path)
        return tuple(_decode(item, element, file, f"{path}[{i}]") for i, (item, element) in enumerate(zip(data, kinds, strict=True)))
    if origin in (Union, types.UnionType):
        return None if data is None else _decode(data, _not_none(kind), file, path)
    if kind is float:
        _expect(isinstance(data, int | float) and not isinstance(data, bool), data, "a number", file, path)
        _expect(abs(data) < 1e300, data, "a finite number", file, path)
        return float(data)
    names = {int: "a whole number", bool: "true or false", str: "text"}
    _expect(isinstance(data, kind) and not (kind is int and isinstance(data, bool)), data, names[kind], file, path)
    return data


def _decode_fields(data: Any, kind: type, file: str, path: str) -> Any:
    _expect(isinstance(data, Mapping), data, f"an object ({kind.__name__})", file, path)
    hints = get_type_hints(kind)
    names = [field.name for field in fields(kind)]
    for name in data:
        if name not in names:
            near = _nearest(name, names)
            remedy = f"did you mean {near!r}?" if near else f"remove it; {kind.__name__} has {', '.join(names)}"
            raise InputError("unknown field", where=_place(file, _join(path, name)), remedy=remedy)
    for name in names:
        if name not in data:
            raise InputError("missing field", where=_place(file, _join(path, name)), remedy="restore it or make the file again")
    values = {name: _decode(data[name], hints[name], file, _join(path, name)) for name in names}
    try:
        return kind(**values)
    except InputError as error:
        field = error.where.rpartition(".")[2]
        place = _join(path, field) if field in names else path
        raise InputError(error.what, where=_place(file, place), remedy=error.remedy) from None


def _element_kinds(kind: Any, length: int) -> tuple[Any, ...]:
    arguments = get_args(kind)
    return (arguments[0],) * length if len(arguments) == 2 and arguments[1] is Ellipsis else arguments


def _not_none(kind: Any) -> Any:
    return next(argument for argument in get_args(kind) if argument is not type(None))


def _expect(holds: bool, data: Any, wanted: str, file: str, path: str) -> None:
    if not holds:
        text = repr(data)
        shown = text if len(text) <= 60 else text[:57] + "..."
        raise InputError(f"{shown} is not {wanted}", where=_place(file, path), remedy=f"give {wanted}")


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else str(name)


def _place(file: str, path: str) -> str:
    return f"{file}: {path}" if path else file


def _nearest(name: str, names: list[str]) -> str:
    from difflib import get_close_matches

    return next(iter(get_close_matches(name, names, n=1)), "")


def dumps(document: Mapping[str, Any]) -> str:
    """Canonical JSON text of a document of plain values."""
    return json.dumps(document, sort_keys=True, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def loads(text: str, where: str) -> dict[str, Any]:
    """A JSON object, strictly: no NaN or Infinity, no repeated keys. Raises InputError with line and column."""

    def constant(name: str) -> Any:
        raise InputError(f"{name} is not a JSON number", where=where, remedy="give a finite number")

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) < len(pairs):
            names = [name for name, _ in pairs]
            repeated = next(name for name in names if names.count(name) > 1)
            raise InputError(f"the key {repeated!r} appears twice", where=where, remedy="keep one of them")
        return result

    try:
        document = json.loads(text, parse_constant=constant, object_pairs_hook=unique)
    except json.JSONDecodeError as error:
        place = f"{where}: line {error.lineno}, column {error.colno}"
        raise InputError(f"not JSON ({error.msg})", where=place, remedy="is the file complete? make it again") from None
    except (RecursionError, ValueError) as error:
        raise InputError(f"not readable as JSON ({error})", where=where, remedy="make the file again") from None
    if not isinstance(document, dict):
        raise InputError(f"a JSON object is wanted, not {type(document).__name__}", where=where, remedy="give an object {...}")
    return document


def read_text(path: str | Path) -> str:
    """The file as UTF-8 text. Raises InputError when it cannot be read."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise InputError(f"cannot read it ({error.strerror})", where=str(path), remedy="check the path") from None
    except UnicodeDecodeError:
        raise InputError("not text (UTF-8)", where=str(path), remedy="give a JSON file") from None
    except (TypeError, ValueError) as error:
        raise InputError(f"not a path ({error})", where=repr(path), remedy="give the path of a file") from None


def write_atomic(path: str | Path, text: str) -> None:
    """Write through a temporary file in the same folder and rename it, so that readers never see half a file. Raises InputError."""
    try:
        target = Path(path)
        handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    except OSError as error:
        raise InputError(
            f"cannot write there ({error.strerror})", where=str(path), remedy="choose a folder that exists and is writable"
        ) from None
    except (TypeError, ValueError) as error:
        raise InputError(f"not a path ({error})", where=repr(path), remedy="give the path of a file") from None
    try:
        with os.fdopen(handle, "w", encoding="utf-8", newline="\n") as stream:
            stream.write(text)
        os.chmod(temporary, 0o644)
        os.replace(temporary, target)
    except OSError as error:
        Path(temporary).unlink(missing_ok=True)
        raise InputError(f"cannot write it ({error.strerror})", where=str(path), remedy="choose another file") from None


def plan_to_json(plan: Plan) -> str:
    """The plan file's text: byte for byte the same for equal plans."""
    return dumps({"format": FORMAT, "memory_risk": plan.estimate.risk, **encode(plan, Plan)})


def plan_from_json(text: str, where: str = "plan") -> Plan:
    """The plan in `text`. Raises InputError: not JSON, another format or version, a wrong field, or parts that contradict each other."""
    from planner.consistency import check_consistency

    document = loads(text, where)
    check_version(document, where)
    document.pop("format")
    risk = document.pop("memory_risk", None)
    plan = decode(document, Plan, where)
    check_consistency(plan, where)
    if risk != plan.estimate.risk:
        what = f"{risk!r}, but peak and usable bytes of the estimate say {plan.estimate.risk}"
        raise InputError(what, where=f"{where}: memory_risk", remedy=f"write {plan.estimate.risk}")
    return plan


def check_version(document: Mapping[str, Any], where: str) -> None:
    """Raises InputError unless the document is a plan of the version this release writes."""
    if document.get("format") != FORMAT:
        raise InputError(
            f"format is {document.get('format')!r}, not {FORMAT!r}",
            where=f"{where}: format",
            remedy="give a file made by `autoplan plan -o`",
        )
    version = document.get("format_version")
    place = f"{where}: format_version"
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        raise InputError(f"{version!r} is not a version", where=place, remedy=f"versions are 1 to {FORMAT_VERSION}")
    if version > FORMAT_VERSION:
        what = f"version {version} is newer than {FORMAT_VERSION}, the newest this release understands"
        raise InputError(what, where=place, remedy="upgrade torch-autoplan, or make the plan again with this release")


def save_plan(plan: Plan, path: str | Path) -> None:
    """Write `plan` to `path`, atomically. Raises InputError when the place cannot be written."""
    write_atomic(path, plan_to_json(plan))


def load_plan(path: str | Path) -> Plan:
    """Read the plan file at `path`. Raises InputError."""
    return plan_from_json(read_text(path), str(path))
