"""Fit a calibration profile to measured runs of one stack: python -m tests.bench.profile --runs FILE [FILE ...] -o profile.json

The profile holds the six constants of costmodel/calibrate.py with their leave-one-out residuals; `costmodel.calibrate.calibrated` applies it to an estimate.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from costmodel.calibrate import profile_text
from tests.bench.calibrated import fit
from tests.bench.price import price_rows
from tests.bench.runs import read_rows


def main(argv: list[str] | None = None) -> int:
    """Command line entry."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.profile", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--runs", nargs="+", required=True, metavar="FILE", help=".jsonl or .jsonl.gz files of measured runs of one stack")
    parser.add_argument("-o", "--output", metavar="FILE", type=Path, help="profile to write (default: standard output)")
    options = parser.parse_args(argv)
    priced, _ = price_rows(read_rows(options.runs))
    text = profile_text(fit([item for item in priced if item.row["use"]["time"] or item.row["use"]["memory"]]))
    if options.output:
        options.output.write_text(text, encoding="utf-8")
    else:
        sys.stdout.write(text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
