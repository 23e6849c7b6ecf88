"""Makes the notebooks from their scripts and runs them, so that they hold what they print and plot.

python examples/notebooks/make_notebooks.py [NAME ...]

A script is in jupytext's percent format: open it as a notebook in Jupyter, or run it as it is. The
``.ipynb`` beside it is made from it; do not edit that one.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import jupytext
import nbformat
from nbclient import NotebookClient
from nbformat import NotebookNode

FOLDER = Path(__file__).parent
SECONDS = 300  # for one cell


def scripts() -> list[Path]:
    return sorted(path for path in FOLDER.glob("*.py") if path.name != Path(__file__).name)


def from_script(script: Path) -> NotebookNode:
    """The notebook of a script, without outputs; cells are numbered, so that diffs stay small."""
    notebook = jupytext.read(script)
    notebook.metadata.pop("jupytext", None)
    for number, cell in enumerate(notebook.cells):
        cell["id"] = f"cell-{number}"
    return notebook


def execute(notebook: NotebookNode, folder: Path) -> NotebookNode:
    """Run all cells in a fresh kernel with ``folder`` as its own; in place.

    Raises:
        nbclient.exceptions.CellExecutionError: a cell raised; with its traceback.
    """
    client = NotebookClient(
        notebook,
        timeout=SECONDS,
        kernel_name="python3",
        resources={"metadata": {"path": str(folder)}},
        coalesce_streams=True,
        record_timing=False,
    )
    # Without ipywidgets tqdm warns, and shows its path.
    extra = {"EXAMPLES": str(FOLDER.parent), "PYTHONWARNINGS": "ignore:IProgress"}
    client.execute(env=os.environ | extra)
    notebook.metadata.pop("language_info", None)
    return notebook


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    names = [script.stem for script in scripts()]
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(names))
    args = parser.parse_args(arguments)
    if unknown := set(args.names) - set(names):
        parser.error(
            f"no notebook is called {', '.join(sorted(unknown))}; there are {', '.join(names)}"
        )
    for script in scripts():
        if not args.names or script.stem in args.names:
            notebook = execute(from_script(script), FOLDER)
            nbformat.write(notebook, script.with_suffix(".ipynb"))
            print(script.with_suffix(".ipynb"))


if __name__ == "__main__":
    main()
