"""Where the command line writes: rich on a terminal, plain text when piped, one JSON document with --json; progress and errors on stderr."""

from __future__ import annotations

import json
import shutil
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TextIO

from costmodel.errors import AutoplanError
from costmodel.units import format_seconds

if TYPE_CHECKING:
    from rich.console import RenderableType

    from planner.search import Progress

ERROR_FORMAT = "autoplan/error"
REPORT_TO = "please report it with the command and the traceback that -v prints"


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """Streams and manners: `as_json` one document, `colour` on stdout, `quiet` no progress, `verbose` tracebacks and progress without a terminal."""

    stdout: TextIO
    stderr: TextIO
    as_json: bool
    colour: bool
    quiet: bool
    verbose: bool

    @classmethod
    def of(cls, arguments: Sequence[str], environ: Mapping[str, str], stdout: TextIO, stderr: TextIO) -> Output:
        """The manners that the arguments, NO_COLOR, TERM and the streams ask for. Read before parsing, so that errors of parsing obey them too."""
        plain = "--no-color" in arguments or bool(environ.get("NO_COLOR")) or environ.get("TERM") == "dumb"
        return cls(
            stdout=stdout,
            stderr=stderr,
            as_json="--json" in arguments,
            colour=stdout.isatty() and not plain,
            quiet=bool({"-q", "--quiet"} & set(arguments)),
            verbose=bool({"-v", "--verbose"} & set(arguments)),
        )

    def show(self, renderable: RenderableType) -> None:
        """Print for people."""
        if self.colour:
            from rich.console import Console

            Console(file=self.stdout, force_terminal=True).print(renderable)
            return
        from planner.render import TEXT_WIDTH, to_text

        width = shutil.get_terminal_size((TEXT_WIDTH, 24)).columns if self.stdout.isatty() else TEXT_WIDTH
        self.stdout.write(to_text(renderable, width))

    def write(self, text: str) -> None:
        """Write text as it is."""
        self.stdout.write(text)

    def document(self, document: Mapping[str, Any]) -> None:
        """Print one JSON document."""
        from planner.codec import dumps

        self.stdout.write(dumps(document))

    def say(self, text: str) -> None:
        """A line on stderr, unless quiet."""
        if not self.quiet:
            print(text, file=self.stderr)

    def error(self, error: AutoplanError) -> None:
        """What, where and what to change, on stderr; with --json also as the document."""
        lines = [f"error: {error.where}: {error.what}" if error.where else f"error: {error.what}"]
        lines += [f"  what helps: {error.remedy}"] if error.remedy else []
        print("\n".join(lines), file=self.stderr)
        if self.as_json:
            facts = {"what": error.what, "where": error.where, "remedy": error.remedy, "exit_code": error.exit_code}
            self.stdout.write(
                json.dumps({"format": ERROR_FORMAT, "format_version": 1, **facts}, sort_keys=True, indent=2, ensure_ascii=False) + "\n"
            )
        if self.verbose:
            traceback.print_exception(error, file=self.stderr)

    def bug(self, error: Exception) -> None:
        """One line for what should not happen; the traceback with -v."""
        print(f"bug: {type(error).__name__}: {error}; {REPORT_TO}", file=self.stderr)
        if self.verbose:
            traceback.print_exception(error, file=self.stderr)

    def progress(self, progress: Progress) -> None:
        """The best so far and the bound: one line that overwrites itself on a terminal, a line per improvement with -v elsewhere."""
        if self.quiet or not (self.stderr.isatty() or self.verbose):
            return
        best = format_seconds(progress.best.estimate.step_s) if progress.best else "none yet"
        counts = f"priced {progress.num_evaluated:,}, rejected {progress.num_rejected:,}, open {progress.num_open:,}"
        text = f"{counts}; best {best}, bound {format_seconds(progress.bound_s)}"
        if self.stderr.isatty():
            print(f"\r\x1b[2K{text}", end="", file=self.stderr, flush=True)
        else:
            print(text, file=self.stderr)

    def end_progress(self) -> None:
        """Clear the progress line."""
        if self.stderr.isatty() and not self.quiet:
            print("\r\x1b[2K", end="", file=self.stderr, flush=True)
