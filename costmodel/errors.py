"""Errors that users meet. Each says what, where, the numbers, and what to change; the CLI maps them to exit codes."""

from __future__ import annotations

import reprlib


class AutoplanError(Exception):
    """Base of every error a user can cause or must act on.

    `what` is the fact with its numbers, `where` the place (file, field, flag, module), `remedy` the change that helps.
    """

    exit_code = 1

    def __init__(self, what: str, *, where: str = "", remedy: str = "") -> None:
        self.what, self.where, self.remedy = what, where, remedy
        text = f"{where}: {what}" if where else what
        super().__init__(f"{text}. {remedy}" if remedy else text)


class InputError(AutoplanError):
    """A model, cluster, job, plan, file or flag that cannot be used as given (exit code 2)."""

    exit_code = 2


class LossyExportError(AutoplanError):
    """The launcher cannot express what the plan says (exit code 3)."""

    exit_code = 3


class InfeasibleError(AutoplanError):
    """No plan fits; carries the nearest miss (exit code 4). See planner.search for the attached facts."""

    exit_code = 4


class UnprovenError(AutoplanError):
    """The search stopped before its proof while a proof was required (exit code 5)."""

    exit_code = 5


def shown(value: object) -> str:
    """A user's value as an error message quotes it: its repr cut short, whatever its size or depth."""
    try:
        return reprlib.repr(value)
    except ValueError:  # an int of more digits than Python prints
        return f"this {type(value).__name__}"


def require_whole(value: object, where: str, *, least: int | None = 1) -> None:
    """Raise InputError unless `value` is an int (a bool is none) of at least `least`; `where` ends with the field's name."""
    if not isinstance(value, int) or isinstance(value, bool) or (least is not None and value < least):
        wanted = "a whole number" if least is None else "a positive whole number" if least == 1 else f"a whole number of at least {least}"
        raise InputError(f"{where.rpartition('.')[2]} is {shown(value)}", where=where, remedy=f"give {wanted}")
