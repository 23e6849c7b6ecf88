"""The README's snippets run as they are printed, and what it names exists."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
SNIPPETS = re.findall(r"^```python\n(.*?)^```", README, flags=re.MULTILINE | re.DOTALL)


def subject(snippet: str) -> str:
    return next(name for name in ("lightning", "accelerate", "torch") if f"{name}" in snippet)


def test_every_host_has_a_snippet() -> None:
    assert [subject(snippet) for snippet in SNIPPETS] == ["torch", "lightning", "accelerate"]


@pytest.mark.parametrize("snippet", SNIPPETS, ids=subject)
def test_snippet_runs(snippet: str, tmp_path: Path) -> None:
    """In a fresh interpreter: Lightning and Accelerate must know the modes without our import."""
    script = tmp_path / "snippet.py"
    script.write_text(snippet)
    done = subprocess.run(
        [sys.executable, str(script)], cwd=tmp_path, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("target", sorted(set(re.findall(r"^make (\w+)", README, re.MULTILINE))))
def test_make_target_exists(target: str) -> None:
    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE)


def test_the_ci_command_is_one_that_the_readme_names() -> None:
    commands = (ROOT / ".ci" / "run").read_text().splitlines()[3:]
    assert commands == ["make test"]
    assert re.search(r"^make test\b", README, re.MULTILINE)


@pytest.mark.parametrize("link", sorted(set(re.findall(r"\]\(([\w./-]+)\)", README))))
def test_linked_file_exists(link: str) -> None:
    assert (ROOT / link).exists()
