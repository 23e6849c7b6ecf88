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


@pytest.mark.parametrize("version", ["2.6.0+cu124", "2.5.1", "1.13.1"])
@pytest.mark.parametrize("name", ["torch_bf16", "torch_bf16.optim.adam"])
def test_an_older_one_is_refused_before_anything_else_is_imported(version, name):
    script = f"""
import sys, torch
torch.__version__ = {version!r}
try:
    import {name}
except ImportError as error:
    print(error)
print([each for each in sys.modules if each.startswith("torch_bf16.")])
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False
    )
    needed = f"torch>={FLOOR}"
    assert done.stdout.splitlines() == [
        f'torch_bf16 needs {needed} and found {version}. Run: pip install -U "{needed}"',
        "['torch_bf16.errors']",
    ], done.stderr
