"""Restrictions: what the user fixed before the search, from text ("tp=8,pp<=4,recompute=full|none") or a mapping ({"tp": 8, "pp": "<=4"}).

Grammar: terms joined by commas; a term is NAME OP VALUE with OP one of = != <= >= < >; = and != take alternatives joined by |.
Names are the fields of Strategy and Mesh, with the short forms of ALIASES. Nothing is guessed: a name, operator or value that does not fit is an error.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from costmodel.errors import InputError
from planner.strategy import CP_KINDS, RECOMPUTE, SCHEDULES

Value = int | bool | str

ALIASES = {"zero": "zero_stage", "mb": "micro_batch", "sp": "sequence_parallel", "flash": "flash_attention"}
COUNTS = (
    "pp",
    "dp",
    "dp_replicate",
    "dp_shard",
    "cp",
    "tp",
    "ep",
    "micro_batch",
    "num_micro_batches",
    "zero_stage",
    "vpp",
    "recompute_layers",
)
SWITCHES = ("sequence_parallel", "flash_attention", "compile")
CHOICES = {"schedule": SCHEDULES, "recompute": RECOMPUTE, "cp_kind": CP_KINDS}
NAMES = (*COUNTS, *SWITCHES, *CHOICES)
_TERM = re.compile(r"\s*([A-Za-z_]+)\s*(!=|<=|>=|==|=|<|>)\s*([\w|\s]+?)\s*")
_BOOLEANS = {"true": True, "on": True, "yes": True, "1": True, "false": False, "off": False, "no": False, "0": False}


@dataclass(frozen=True, slots=True, kw_only=True)
class Restriction:
    """`name operator values`: values has one element unless the operator is = or !=."""

    name: str
    operator: str
    values: tuple[Value, ...]

    def allows(self, value: Value) -> bool:
        """Whether `value` of this name may be used."""
        if self.operator == "=":
            return value in self.values
        if self.operator == "!=":
            return value not in self.values
        limit, number = int(self.values[0]), int(value)
        return {"<=": number <= limit, ">=": number >= limit, "<": number < limit, ">": number > limit}[self.operator]

    def __str__(self) -> str:
        return f"{self.name}{self.operator}{'|'.join(str(value).lower() for value in self.values)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Restrictions:
    """All restrictions of one search; a value is allowed when every one of its name allows it."""

    items: tuple[Restriction, ...] = ()

    def allows(self, name: str, value: Value) -> bool:
        """Whether `value` of `name` may be used."""
        return all(item.allows(value) for item in self.items if item.name == name)

    def mentions(self, name: str) -> bool:
        """Whether the user said anything about `name`."""
        return any(item.name == name for item in self.items)

    def values(self, name: str) -> tuple[Value, ...]:
        """The values an `=` names for `name`, in the user's order; () when there is none."""
        return next((item.values for item in self.items if item.name == name and item.operator == "="), ())

    def __str__(self) -> str:
        return ",".join(map(str, self.items))


def parse_restrictions(text: object, where: str = "--fix") -> Restrictions:
    """Restrictions from text or a mapping. Raises InputError naming the term that cannot be read."""
    if text is None or text == "":
        return Restrictions()
    if isinstance(text, Mapping):
        terms = [_mapping_term(name, value) for name, value in text.items()]
    elif isinstance(text, str):
        terms = text.split(",")
    else:
        remedy = 'give text ("tp=8,pp<=4") or a mapping ({"tp": 8})'
        raise InputError(f"{type(text).__name__} is neither text nor a mapping", where=where, remedy=remedy)
    items = tuple(_parse_term(term, where) for term in terms)
    for i, item in enumerate(items):
        clash = [other for other in items[:i] if other.name == item.name and other.operator == item.operator == "="]
        if clash:
            raise InputError(f"{item.name} is fixed twice: {clash[0]} and {item}", where=where, remedy="keep one")
    return Restrictions(items=items)


def _mapping_term(name: str, value: object) -> str:
    if isinstance(value, list | tuple | set | frozenset):
        return f"{name}={'|'.join(map(str, value))}"
    text = str(value).strip()
    return f"{name}{text}" if text[:1] in ("<", ">", "!", "=") else f"{name}={text}"


def _parse_term(term: str, where: str) -> Restriction:
    match = _TERM.fullmatch(term)
    if match is None:
        raise InputError(f"{term.strip()!r} is not NAME OP VALUE", where=where, remedy='write for example "tp=8,pp<=4,recompute=full"')
    name, operator, text = match.groups()
    name = ALIASES.get(name, name)
    operator = "=" if operator == "==" else operator
    if name not in NAMES:
        raise InputError(f"unknown name {name!r}", where=where, remedy=f"use one of {', '.join(NAMES)}")
    parts = [part.strip() for part in text.split("|")]
    if operator not in ("=", "!=") and (len(parts) > 1 or name not in COUNTS):
        raise InputError(
            f"{term.strip()!r}: {operator} needs one number", where=where, remedy="use = or != for choices, e.g. recompute=full|none"
        )
    return Restriction(name=name, operator=operator, values=tuple(_parse_value(name, part, where) for part in parts))


def _parse_value(name: str, text: str, where: str) -> Value:
    if name in COUNTS:
        least = 0 if name in ("zero_stage", "recompute_layers") else 1
        if not text.isdecimal() or int(text) < least:
            raise InputError(f"{name} is {text!r}", where=where, remedy=f"give a whole number of at least {least}")
        return int(text)
    if name in SWITCHES:
        if text.lower() not in _BOOLEANS:
            raise InputError(f"{name} is {text!r}", where=where, remedy="give true or false")
        return _BOOLEANS[text.lower()]
    if text not in CHOICES[name]:
        raise InputError(f"{name} is {text!r}", where=where, remedy=f"use one of {', '.join(CHOICES[name])}")
    return text
