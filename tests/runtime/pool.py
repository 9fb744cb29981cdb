"""A pool of gloo ranks for tests: one process that has torch imported forks 4 or 8 ranks a case, so that a case costs a second, not an import."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


class Pool:
    """Runs `module:function` on several ranks. The process behind it starts with the first case and again when it was lost."""

    def __init__(self) -> None:
        self.process: subprocess.Popen[str] | None = None
        self.reply = -1
        self.buffer = b""

    def run(self, case: str, *, ranks: int, timeout_s: float = 120.0, **arguments: Any) -> list[Any]:
        """The result of every rank. Raises AssertionError with the tracebacks when a rank fails, dies or is late."""
        if self.process is None:
            self._start()
        request = {"case": case, "ranks": ranks, "timeout_s": timeout_s, "arguments": arguments}
        try:
            self.process.stdin.write(json.dumps(request) + "\n")
            self.process.stdin.flush()
            outcomes = self._read(timeout_s + 30)["outcomes"]
        except (OSError, ValueError) as error:
            self.close()
            raise AssertionError(f"the pool was lost: {error}") from error
        errors = [f"--- rank {rank}\n{outcome['error']}" for rank, outcome in enumerate(outcomes) if "error" in outcome]
        if errors:
            raise AssertionError("\n".join(errors))
        return [outcome["result"] for outcome in outcomes]

    def close(self) -> None:
        """Stop the process."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process.stdin.close()
            os.close(self.reply)
            self.process = None

    def _start(self) -> None:
        self.reply, write = os.pipe()
        self.buffer = b""
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
            "MKL_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
        }
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.runtime.workers", "--reply", str(write)],
            stdin=subprocess.PIPE, pass_fds=(write,), cwd=ROOT, env=environment, text=True,
        )  # fmt: skip
        os.close(write)
        self._read(180)

    def _read(self, timeout_s: float) -> dict[str, Any]:
        while b"\n" not in self.buffer:
            if not select.select([self.reply], [], [], timeout_s)[0]:
                raise ValueError("no reply in time")
            part = os.read(self.reply, 1 << 20)
            if not part:
                raise ValueError("the process ended")
            self.buffer += part
        line, _, self.buffer = self.buffer.partition(b"\n")
        return json.loads(line)
