"""The README says what the build does: its commands are run again, its Python is run, and the links of every page lead somewhere."""

from __future__ import annotations

import difflib
import re
import subprocess
import sys

import pytest

from tests.e2e.readme import README, refreshed

ROOT = README.parent
PAGES = sorted(path.relative_to(ROOT).as_posix() for pattern in ("*.md", "docs/*.md", "[!.]*/README.md") for path in ROOT.glob(pattern))
LINK = re.compile(r"\]\((?!https?://|#)([^)#\s]+)")


def test_commands_print_what_the_readme_shows(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shown = README.read_text()
    changed = list(difflib.unified_diff(shown.splitlines(), refreshed(shown).splitlines(), "README.md", "this build", n=0, lineterm=""))
    assert not changed, "\n".join(["`make readme` puts this build's output in:", *changed])


def test_python_of_the_readme_runs(tmp_path):
    (snippet, *_) = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    command = [sys.executable, "-W", "error", "-c", snippet]
    done = subprocess.run(command, cwd=tmp_path, env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "tokens/s" in done.stdout
    assert (tmp_path / "plan.json").exists()


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page):
    folder = (ROOT / page).parent
    assert not [target for target in LINK.findall((ROOT / page).read_text()) if not (folder / target).exists()]
