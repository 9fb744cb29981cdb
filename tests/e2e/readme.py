"""The README's console blocks, run again: `python -m tests.e2e.readme` rewrites them with the output of this build; test_readme.py fails when they differ.

A block is a line `<!-- lines: REGEX -->` and a console fence. Its `$ autoplan ...` lines are the commands, run in one scratch folder so that later blocks
find the plans of earlier ones. Of their output the lines that match are kept, without the panel's frame; `...` stands for what was left out between them.
"""

from __future__ import annotations

import io
import os
import re
import shlex
import tempfile
import textwrap
from contextlib import chdir, redirect_stderr, redirect_stdout
from pathlib import Path

from planner.cli import main

README = Path(__file__).resolve().parents[2] / "README.md"
BLOCK = re.compile(r"<!-- lines: (?P<keep>.+?) -->\n```console\n(?P<body>.*?)```\n", re.DOTALL)
WIDTH = 130
BUG, BAD_INPUT = 1, 2


def refreshed(text: str) -> str:
    """`text` with every console block as this build would print it. Commands write into the working directory."""
    return BLOCK.sub(_block, text)


def _block(match: re.Match[str]) -> str:
    commands = [line[2:] for line in match["body"].splitlines() if line.startswith("$ ")]
    lines = [line for command in commands for line in (f"$ {command}", *kept(output_of(command), match["keep"]))]
    body = "".join(f"{line}\n" for line in lines)
    return f"<!-- lines: {match['keep']} -->\n```console\n{body}```\n"


def output_of(command: str) -> list[str]:
    """Lines that `autoplan ...` prints, on stdout and stderr, without the panel's frame."""
    name, *arguments = shlex.split(command)
    assert name == "autoplan", command
    output = io.StringIO()
    with redirect_stdout(output), redirect_stderr(output):
        code = main(arguments)
    assert code not in (BUG, BAD_INPUT), f"{command}: exit code {code}\n{output.getvalue()}"
    return [re.sub(r"^[│╭╰] ?|[│╮╯]$", "", line).rstrip() for line in output.getvalue().splitlines()]


def kept(output: list[str], pattern: str) -> list[str]:
    """The lines that match, folded to the README's width, with `...` for what was left out between them."""
    lines: list[str] = []
    left_out = False
    for line in output:
        if not re.search(pattern, line):
            left_out = left_out or bool(line.strip())
        elif line or (lines and lines[-1]):
            lines += ["..."] if left_out and lines else []
            lines += [line] if len(line) <= WIDTH else _folded(line)
            left_out = False
    assert lines, "\n".join([f"nothing matches {pattern}", *output])
    return lines if lines[-1] else lines[:-1]


def _folded(line: str) -> list[str]:
    indent = " " * (len(line) - len(line.lstrip()) + 4)
    return textwrap.wrap(line, WIDTH, subsequent_indent=indent, break_long_words=False)


if __name__ == "__main__":
    os.environ["NO_COLOR"] = "1"
    with tempfile.TemporaryDirectory() as folder, chdir(folder):
        text = refreshed(README.read_text())
    README.write_text(text)
