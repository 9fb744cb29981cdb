"""Config: a Hugging Face config.json read key by key, every refusal naming file, key, value and remedy."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from costmodel.errors import InputError

_LARGEST = 10**9


class Config:
    """Typed access to a config mapping. `where` is the file or name it came from. Aliases are tried in order (`n_embd`, `hidden_size`)."""

    def __init__(self, values: Mapping[str, object], where: str) -> None:
        self.values, self.where = values, where

    def fail(self, key: str, what: str, remedy: str) -> InputError:
        """An InputError at `key` of this config."""
        return InputError(what, where=f"{self.where}: {key}", remedy=remedy)

    def find(self, *keys: str) -> tuple[str, object]:
        """The first of `keys` that is present and not null, else the first key and None."""
        for key in keys:
            if self.values.get(key) is not None:
                return key, self.values[key]
        return keys[0], None

    def integer(self, *keys: str, default: int | None = None, least: int = 1, most: int = _LARGEST) -> int:
        """A whole number from `least` to `most`. Raises InputError when missing without default, of another type, or out of range."""
        key, value = self.find(*keys)
        if value is None:
            if default is None:
                raise self.fail(key, "the key is missing", f"add {key}, a whole number of at least {least}")
            return default
        if isinstance(value, float) and math.isfinite(value) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.fail(key, f"{value!r} is not a whole number", f"give a whole number of at least {least}")
        if not least <= value <= most:
            raise self.fail(key, f"{value} is out of range", f"give a whole number from {least} to {most}")
        return value

    def layers(self, *keys: str, default: int | None = None) -> int:
        """A number of layers: at most 10,000, since every layer is listed."""
        return self.integer(*keys, default=default, most=10_000)

    def flag(self, *keys: str, default: bool) -> bool:
        """A boolean. Raises InputError for anything else."""
        key, value = self.find(*keys)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.fail(key, f"{value!r} is not a boolean", "give true or false")
        return value

    def number(self, *keys: str, default: float) -> float:
        """A finite real number. Raises InputError for anything else."""
        key, value = self.find(*keys)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            raise self.fail(key, f"{value!r} is not a finite number", "give a finite number")
        return float(value)

    def choice(self, *keys: str, known: Sequence[str], default: str | None = None) -> str:
        """One of `known`. Raises InputError otherwise."""
        key, value = self.find(*keys)
        if value is None and default is not None:
            return default
        if not isinstance(value, str) or value not in known:
            raise self.fail(key, f"{value!r} is not supported", f"use one of {', '.join(known)}, or pass the nn.Module itself")
        return value

    def section(self, key: str) -> Config | None:
        """A nested object, or None when absent. Raises InputError when it is something else."""
        value = self.values.get(key)
        if value is None:
            return None
        if not isinstance(value, Mapping):
            raise self.fail(key, f"{value!r} is not an object", "give a JSON object")
        return Config(value, f"{self.where}: {key}")

    def heads(self, hidden: int, heads: int, *keys: str) -> int:
        """Width of one head: the key when given, else hidden / heads, which must divide."""
        key, value = self.find(*(keys or ("head_dim",)))
        if value is not None:
            return self.integer(key)
        if hidden % heads:
            raise self.fail(
                "num_attention_heads", f"{heads} heads do not divide hidden size {hidden}", "change one of them, or give head_dim"
            )
        return hidden // heads

    def kv_heads(self, heads: int, *keys: str, default: int | None = None) -> int:
        """Key-value heads, which must divide the heads."""
        key, value = self.find(*(keys or ("num_key_value_heads",)))
        count = heads if value is None and default is None else self.integer(key, default=default)
        if heads % count:
            raise self.fail(key, f"{count} key-value heads do not divide {heads} heads", f"give a divisor of {heads}")
        return count
