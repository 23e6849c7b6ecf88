"""Sphinx over the Markdown of the repository: `make docs` builds it strictly into build/docs.

The source folder is the repository's root, so that a link between two files works in both places.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

from docutils import nodes
from latex2mathml.converter import convert

import torch_bf16

ROOT = Path(__file__).parents[1]

project = "torch-bf16"
author = "the authors of torch-bf16"
release = version = torch_bf16.__version__
root_doc = "docs/index"
LISTS = (root_doc, "examples/README")  # what their lists link to is below them in the site
include_patterns = [
    "docs/**.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "kernels/README.md",
    "kernels/**/README.md",
    "*/_patches/README.md",
    "examples/README.md",
    "examples/notebooks/*.ipynb",
    "examples/results/*/README.md",
]
exclude_patterns = [".*", "build", "dist", "demo", "tests", "**/__pycache__"]
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]

myst_enable_extensions = ["attrs_inline", "dollarmath"]
myst_heading_anchors = 4
nb_execution_mode = "off"

autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented_params"
napoleon_use_rtype = False
autoclass_content = "class"

# Browsers draw MathML themselves; MathJax would be fetched from elsewhere.
html_math_renderer = "mathml"
html_theme = "furo"
html_title = "torch-bf16"
html_copy_source = False
html_show_copyright = False
html_show_sourcelink = False
html_extra_path = ["root"]
copybutton_exclude = ".linenos, .gp, .go"
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True

PICTURE = re.compile(
    r'<picture>\s*<source media="\(prefers-color-scheme: dark\)" srcset="(?P<dark>[^"]+)">\s*'
    r'<img alt="(?P<alt>[^"]+)" src="(?P<light>[^"]+)">\s*</picture>'
)


def write_for_sphinx(app: Any, docname: str, source: list[str]) -> None:
    """What plain Markdown says in its own way: pictures for dark pages, and tables of contents.

    Args:
        app: Sphinx.
        docname: of the page, relative to the root.
        source: one element, the page; replaced.
    """
    text = PICTURE.sub(
        r"![\g<alt>](\g<light>){.only-light} ![\g<alt>](\g<dark>){.only-dark}", source[0]
    )
    if docname in LISTS:
        for caption, body in sections(text):
            if pages := re.findall(r"^- \[.*?\]\((\S+)\.(?:md|ipynb)\)", body, re.M):
                listed = "\n".join(pages)
                text += f"\n```{{toctree}}\n:hidden:\n:caption: {caption}\n\n{listed}\n```\n"
    source[0] = text


def sections(index: str) -> list[tuple[str, str]]:
    """The captions of the index and what is under each."""
    parts = re.split(r"^## (.*)\n", index, flags=re.M)[1:]
    return list(zip(parts[::2], parts[1::2], strict=True))


def write_for_programs(app: Any, failure: Exception | None) -> None:
    """The Markdown of each page beside it, and llms.txt, which lists them as the index does.

    Args:
        app: Sphinx, after its build.
        failure: what ended the build, or None.
    """
    if failure is not None or app.builder.name != "html":
        return
    out = Path(app.outdir)
    for name in app.env.found_docs:
        source = Path(app.env.doc2path(name))
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source, out / f"{name}{source.suffix}")
    index = (ROOT / f"{root_doc}.md").read_text()
    title, first = re.match(r"# (.*)\n\n((?:.+\n)+)", index).groups()
    lines = [f"# {title}", "", *("> " + line for line in first.splitlines())]
    for caption, body in sections(index):
        # Relative to the site's root, where llms.txt is.
        entries = re.sub(r"\]\((?=[\w./-]+\.(?:md|ipynb))", "](docs/", body.strip())
        lines += ["", f"## {caption}", "", entries.replace("docs/../", "")]
    (out / "llms.txt").write_text("\n".join(lines) + "\n")


def write_formula(writer: Any, node: Any) -> None:
    """A formula as MathML, in its line or on lines of its own."""
    formula = node.astext()
    if isinstance(node, nodes.math_block):
        shown = convert(formula, display="block")
        writer.body.append(f'<div style="overflow-x: auto; margin: 1em 0">{shown}</div>')
    else:
        writer.body.append(convert(formula))
    raise nodes.SkipNode


def setup(app: Any) -> None:
    app.add_html_math_renderer("mathml", (write_formula, None), (write_formula, None))
    app.connect("source-read", write_for_sphinx)
    app.connect("build-finished", write_for_programs)
