"""The oldest torch: one number everywhere, and one message below it."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from torch_bf16.errors import OLDEST_TORCH

ROOT = Path(__file__).parents[2]
FLOOR = ".".join(map(str, OLDEST_TORCH))


@pytest.mark.parametrize(
    ("page", "pattern"),
    [
        ("pyproject.toml", r'"torch>=([\d.]+)"'),
        ("README.md", r"torch ([\d.]+) or newer, `lightning`"),
        ("docs/start.md", r"needs torch ([\d.]+) or newer"),
    ],
)
def test_pages_name_the_same(page, pattern):
    assert re.findall(pattern, (ROOT / page).read_text()) == [FLOOR]


IMPORTS = """
import sys, torch
for version in {versions}:
    torch.__version__ = version
    for name in {names}:
        try:
            __import__(name)
        except ImportError as error:
            print(error)
        ours = [each for each in sys.modules if each.startswith("torch_bf16")]
        print(ours)
        for each in ours:
            del sys.modules[each]
"""


def test_an_older_one_is_refused_before_anything_else_is_imported():
    versions, names = ["2.6.0+cu124", "2.5.1", "1.13.1"], ["torch_bf16", "torch_bf16.optim.adam"]
    script = IMPORTS.format(versions=versions, names=names)
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False
    )
    needed = f"torch>={FLOOR}"
    expected = []
    for version in versions:
        said = f'torch_bf16 needs {needed} and found {version}. Run: pip install -U "{needed}"'
        expected += [said, "['torch_bf16.errors']"] * len(names)
    assert done.stdout.splitlines() == expected, done.stderr
