"""The notebooks run from beginning to end, and are what their scripts make."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest

pytest.importorskip("jupytext")
import make_notebooks

# The steps of a run, and enough of them to see that it runs.
FEWER_STEPS = {"language_model": {"150": "20"}}
SCRIPTS = [pytest.param(script, id=script.stem) for script in make_notebooks.scripts()]


def plots(notebook: nbformat.NotebookNode) -> int:
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    return sum("image/png" in output.get("data", {}) for output in outputs)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("script", SCRIPTS)
def test_a_notebook_runs_and_plots(
    script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # ipykernel on Python 3.11 and newer asks for it, for its debugger.
    monkeypatch.setenv("PYDEVD_DISABLE_FILE_VALIDATION", "1")
    # Many CPUs are slow at products in bf16.
    monkeypatch.setenv("BF16_COMPUTE", "fp32")
    notebook = make_notebooks.from_script(script)
    for steps, fewer in FEWER_STEPS.get(script.stem, {}).items():
        assert sum(steps in cell.source for cell in notebook.cells) >= 2
        for cell in notebook.cells:
            cell.source = cell.source.replace(steps, fewer)
    executed = make_notebooks.execute(notebook, tmp_path)
    assert plots(executed) >= 1
    assert "On a GPU" in executed.cells[0].source


@pytest.mark.parametrize("script", SCRIPTS)
def test_the_notebook_beside_a_script_is_made_from_it(script: Path) -> None:
    made, kept = (
        make_notebooks.from_script(script),
        nbformat.read(script.with_suffix(".ipynb"), as_version=4),
    )
    assert [(cell.cell_type, cell.source) for cell in made.cells] == [
        (cell.cell_type, cell.source) for cell in kept.cells
    ], f"python examples/notebooks/make_notebooks.py {script.stem}"
    assert plots(kept) >= 1
    text = script.with_suffix(".ipynb").read_text()
    assert str(Path.home()) not in text
    assert "site-packages" not in text
