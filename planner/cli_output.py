"""Where the command line writes: rich on a terminal, plain text when piped, one JSON document with --json; progress and errors on stderr."""

from __future__ import annotations

import json
import shutil
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TextIO

from costmodel.errors import AutoplanError, InputError
from costmodel.units import format_seconds

if TYPE_CHECKING:
    from rich.console import RenderableType

    from planner.outcome import Progress

ERROR_FORMAT = "autoplan/error"
REPORT_TO = "please report it with the command and the traceback that -v prints"

ASCII = str.maketrans("╭╮╰╯│─█░", "++++|-#.")


class OutputError(InputError):
    """stdout cannot take the answer (disk full, closed)."""


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
        self.write(to_text(renderable, width))

    def write(self, text: str) -> None:
        """Write text; what the stream's encoding lacks is drawn in ASCII or escaped. Raises OutputError, or BrokenPipeError when the reader left."""
        encoding = getattr(self.stdout, "encoding", None) or "utf-8"
        if not _encodes(text, encoding):
            text = text.translate(ASCII).encode(encoding, "backslashreplace").decode(encoding)
        try:
            self.stdout.write(text)
            self.stdout.flush()
        except BrokenPipeError:
            raise
        except OSError as error:
            raise OutputError(f"cannot write the answer ({error.strerror})", where="stdout", remedy="send it elsewhere") from None

    def write_json(self, text: str) -> None:
        """Write JSON text, which stays valid JSON in any encoding."""
        plain = _encodes(text, getattr(self.stdout, "encoding", None) or "utf-8")
        self.write(text if plain else "".join(char if char.isascii() else json.dumps(char)[1:-1] for char in text))

    def document(self, document: Mapping[str, Any]) -> None:
        """Print one JSON document."""
        from planner.codec import dumps

        self.write_json(dumps(document))

    def say(self, text: str) -> None:
        """A line on stderr, unless quiet."""
        if not self.quiet:
            print(text, file=self.stderr)

    def warn(self, text: str) -> None:
        """A line on stderr that quiet does not hush."""
        print(text, file=self.stderr)

    def error(self, error: AutoplanError) -> None:
        """What, where and what to change, on stderr; with --json also as the document."""
        self.complain(error)
        if self.as_json:
            facts = {"what": error.what, "where": error.where, "remedy": error.remedy, "exit_code": error.exit_code}
            self.document({"format": ERROR_FORMAT, "format_version": 1, **facts})
        if self.verbose:
            traceback.print_exception(error, file=self.stderr)

    def complain(self, error: AutoplanError) -> None:
        """What, where and what to change, on stderr."""
        lines = [f"error: {error.where}: {error.what}" if error.where else f"error: {error.what}"]
        lines += [f"  what helps: {error.remedy}"] if error.remedy else []
        print("\n".join(lines), file=self.stderr)

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


def _encodes(text: str, encoding: str) -> bool:
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        return False
    return True
