"""The command line: `autoplan VERB ...`. Answers go to stdout, everything else to stderr; the exit code says what happened.

0 done   1 bug   2 bad input   3 export would lose something   4 does not fit   5 stopped before the proof that was required   130 interrupted
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from io import StringIO
from typing import NoReturn, TextIO

from costmodel.errors import AutoplanError, InputError
from planner.cli_output import Output, OutputError

EXAMPLES = """examples:
  autoplan plan llama3-8b 8xH100 --seq-len 8192 --global-batch 128
  autoplan plan llama3-70b 8xH100*8 --seq-len 8192 --global-batch 512 --fix "tp=8,pp<=4" -o plan.json
  autoplan plan pkg.mod:build_model local --seq-len 64 --global-batch 16
  autoplan estimate llama3-8b 8xH100 --seq-len 8192 --global-batch 128 --tp 2 --zero 3 --recompute full
  autoplan explain plan.json
  autoplan export plan.json --to torchtitan -o out/

exit codes: 0 done, 1 bug, 2 bad input, 3 export would lose something, 4 does not fit, 5 stopped before the proof that was required"""


class Parser(argparse.ArgumentParser):
    """argparse whose errors are InputErrors, so that they look and exit like every other."""

    def error(self, message: str) -> NoReturn:
        """Raise InputError with the verb as its place."""
        raise InputError(message, where=self.prog, remedy=f"see `{self.prog} --help`")


def build_parser() -> Parser:
    """The parser of all verbs; every verb sets `handler`."""
    from planner import cli_plan, cli_tools

    parser = Parser(
        prog="autoplan", description="The fastest training plan that fits: priced, proven, explained.", epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False,
    )  # fmt: skip
    parser.add_argument("--version", action="store_true", help="print the version and exit")
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", parser_class=Parser)
    for module in (cli_plan, cli_tools):
        module.add_verbs(verbs)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code. Never raises for what a user can cause."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    output = Output.of(arguments, os.environ, sys.stdout or _nowhere(), sys.stderr or _nowhere())
    try:
        return _typed(arguments, output)
    except BrokenPipeError:
        sys.stdout = _nowhere()  # the reader went away: let the interpreter flush into nothing
        return 0
    except OutputError as error:
        sys.stdout = _nowhere()
        output.complain(error)
        return error.exit_code


def _nowhere() -> TextIO:
    """A stream that takes everything: for a closed stdout or stderr (None), and for one that went away."""
    return StringIO()


def _typed(arguments: list[str], output: Output) -> int:
    """Run one command; every exception but those of stdout itself becomes an exit code."""
    try:
        return _run(arguments, output)
    except (OutputError, BrokenPipeError):
        raise
    except AutoplanError as error:
        output.error(error)
        return error.exit_code
    except KeyboardInterrupt:
        output.say("interrupted")
        return 130
    except SystemExit as leave:
        return leave.code if isinstance(leave.code, int) else 0
    except Exception as error:
        output.bug(error)
        return 1


def _run(arguments: list[str], output: Output) -> int:
    parser = build_parser()
    options = parser.parse_args(arguments)
    if options.version:
        from importlib.metadata import PackageNotFoundError, version

        try:
            print(f"autoplan {version('torch-autoplan')}")
        except PackageNotFoundError:
            print("autoplan (not installed)")
        return 0
    if options.verb is None:
        parser.error("give a verb: plan, estimate, explain, diff, export, run, hardware or models")
    code: int = options.handler(options, output)
    return code


if __name__ == "__main__":
    sys.exit(main())
