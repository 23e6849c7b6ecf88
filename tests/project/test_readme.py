"""The README's snippets run as they are printed, and what it names exists."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import gpu_table
import pytest
from forked_scripts import run_script

import torch_bf16
from torch_bf16.tools.estimate.optimizers import OPTIMIZERS

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
START = (ROOT / "docs" / "start.md").read_text()
SNIPPET = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


def test_the_snippet_runs(tmp_path: Path) -> None:
    (snippet,) = SNIPPET.findall(README)
    script = tmp_path / "snippet.py"
    script.write_text(snippet)
    run_script(script, folder=tmp_path)


# In one interpreter, because each takes seconds to start.
HOSTS_ALONE = """
import sys, runpy
for host, script in zip(("accelerate", "lightning"), sys.argv[1:]):
    assert not {host, f"{host}_bf16"} & {*sys.modules}
    runpy.run_path(script, run_name="__main__")
"""


def test_hosts_know_the_modes_by_themselves(tmp_path: Path) -> None:
    """Their first programs, where nothing of theirs was imported."""
    _, *of_hosts = SNIPPET.findall(START)
    scripts = []
    for host in ("accelerate", "lightning"):
        (snippet,) = (each for each in of_hosts if host in each)
        scripts.append(tmp_path / f"{host}_snippet.py")
        scripts[-1].write_text(snippet)
    command = [sys.executable, "-c", HOSTS_ALONE, *map(str, scripts)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("target", sorted(set(re.findall(r"^make (\w+)", README, re.MULTILINE))))
def test_make_target_exists(target: str) -> None:
    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE)


def test_the_ci_command_is_one_that_the_readme_names() -> None:
    commands = (ROOT / ".ci" / "run").read_text().splitlines()[3:]
    assert commands == ["make test"]
    assert re.search(r"^make test\b", README, re.MULTILINE)


def test_the_readme_can_be_read_in_a_few_minutes() -> None:
    before, _, rest = README.partition(gpu_table.BEGIN)
    _, _, after = rest.partition(gpu_table.END)
    assert len((before + after).split()) <= 1500


@pytest.fixture
def package_index(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The build hook, whose base class is in an environment that only builds have."""
    stub = SimpleNamespace(MetadataHookInterface=object)
    monkeypatch.setitem(sys.modules, "hatchling.metadata.plugin.interface", stub)
    path = ROOT / "docs" / "package_index.py"
    spec = importlib.util.spec_from_file_location("package_index", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_package_index_is_given_no_relative_link(package_index: ModuleType) -> None:
    there = r"\]\((?!#)([^)\s]+)\)|(?:src|srcset)=\"([^\"]+)\""
    base = "https://github.com/a/b"
    shown = package_index.with_absolute_links(README, base)
    found = ["".join(groups) for groups in re.findall(there, shown)]
    assert len(found) > 5
    for target in found:
        assert target.startswith("https://")
        inside = re.match(rf"{base}/(?:blob|raw)/main/([^#]+)", target)
        assert inside is None or (ROOT / inside[1]).exists(), target
    for groups in re.findall(there, package_index.with_absolute_links(README, None)):
        assert "".join(groups).startswith("https://")


def test_the_optimizers_are_listed_and_counted() -> None:
    kinds = [getattr(torch_bf16, name) for name in torch_bf16.__all__]
    ours = {
        kind.__name__
        for kind in kinds
        if isinstance(kind, type)
        and issubclass(kind, torch_bf16.BF16Optimizer)
        and kind is not torch_bf16.BF16Optimizer
    }
    assert {*OPTIMIZERS} == ours, "see PLAIN of tools/estimate/optimizers.py"
    page = (ROOT / "docs" / "optimizers.md").read_text().partition("\n## ")[0]
    assert ours <= {*re.findall(r"`(\w+)`", page)}, "a row of docs/optimizers.md"
    words = ("twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen")
    counted = words[len(ours) - 12]
    assert f"[{counted} optimizers and any other](" in README, "the count in README.md"
    peers = (ROOT / "docs" / "peers.md").read_text()
    assert f"[our {counted}](" in peers, "the count in docs/peers.md"
