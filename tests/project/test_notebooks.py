"""The notebooks run from beginning to end, and are what their scripts make."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest
from forked_scripts import call_in_fork

pytest.importorskip("jupytext")
pytest.importorskip("matplotlib")
import make_notebooks
import matplotlib
from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import capture_output
from matplotlib_inline.backend_inline import configure_inline_support

# The steps and the text of a run, and enough of them to see that it runs.
FEWER_STEPS = {
    "language_model": {"150": "8", "steps=20": "steps=4", "2_000_000": "200_000"},
    "four_precisions": {"max_epochs=8": "max_epochs=2"},
    "monitor_and_doctor": {"steps=300": "steps=100"},
}
# One has a kernel of its own, which takes seconds to start.
IN_A_KERNEL = "rounding_by_hand"
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
        assert any(steps in cell.source for cell in notebook.cells)
        for cell in notebook.cells:
            cell.source = cell.source.replace(steps, fewer)
    if script.stem == IN_A_KERNEL:
        assert plots(make_notebooks.execute(notebook, tmp_path)) >= 1
    else:
        monkeypatch.setenv("EXAMPLES", str(make_notebooks.FOLDER.parent))
        call_in_fork(run_cells, nbformat.writes(notebook), folder=tmp_path)
    assert "On a GPU" in notebook.cells[0].source


def run_cells(text: str) -> None:
    """Run a notebook's cells as its kernel would, and look for a plot."""
    matplotlib.use("module://matplotlib_inline.backend_inline")
    shell = InteractiveShell.instance()
    configure_inline_support(shell, "inline")
    found = []
    for cell in nbformat.reads(text, as_version=4).cells:
        if cell.cell_type == "code":
            with capture_output(stderr=False) as printed:
                done = shell.run_cell(cell.source)
            done.raise_error()
            found += printed.outputs
    assert any("image/png" in output.data for output in found)


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
