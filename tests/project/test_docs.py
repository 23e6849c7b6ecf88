"""The pages of docs/ run as they are printed, and what they link to and quote exists."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
from distributions import asked_for_by_tests
from packaging.utils import canonicalize_name
from pages import blocks_of, run_page
from torch.nn.utils import parametrize

import accelerate_bf16
import lightning_bf16
import torch_bf16
from torch_bf16 import plugin_api

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs").rglob("*.md"))
LINKED = sorted(
    {
        *PAGES,
        *ROOT.glob("*.md"),
        *ROOT.glob("examples/*.md"),
        *ROOT.glob("kernels/**/*.md"),
        *ROOT.glob("*/_*/*.md"),
    }
)


def by_name(pages: list[Path]) -> dict:
    return {"argvalues": pages, "ids": [page.relative_to(ROOT).as_posix() for page in pages]}


@pytest.mark.timeout(900)
@pytest.mark.parametrize("page", **by_name([p for p in PAGES if any(blocks_of(p.read_text()))]))
def test_what_a_page_shows_runs(page: Path, tmp_path: Path) -> None:
    fault, ran, missing = run_page(page, tmp_path)
    assert not fault, fault
    lost = asked_for_by_tests() & {canonicalize_name(each) for each in missing}
    assert not lost, f"programs were left out, as {lost} of .[all,dev] cannot be imported"
    needs = f"the programs that need {', '.join(sorted({*missing}))}"
    if not ran:
        pytest.skip(f"holds nothing but {needs}")
    if missing:
        print(f"all but {needs} ran")  # pytest -rP shows it


def slugs(text: str) -> set[str]:
    """The anchors of a page's headings, as GitHub and MyST make them."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S), re.M)
    plain = (re.sub(r"\[(.*?)\]\(.*?\)", r"\1", each).strip().lower() for each in headings)
    return {re.sub(r"[^\w\- ]", "", each).replace(" ", "-") for each in plain}


@pytest.mark.parametrize("page", **by_name(LINKED))
def test_links_lead_to_a_file_and_a_heading(page: Path) -> None:
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S)
    targets = re.findall(r"\]\(([^)\s]+)\)", text) + re.findall(r'(?:src|srcset)="([^"]+)"', text)
    for target in targets:
        if re.match(r"https?://", target):
            continue
        name, _, anchor = target.partition("#")
        file = (page.parent / name).resolve() if name else page
        assert file.exists(), f"{page.name} links to {target}"
        if anchor and file.suffix == ".md":
            assert anchor in slugs(file.read_text()), f"{page.name} links to {target}"


def test_every_page_is_in_the_index_once() -> None:
    index = ROOT / "docs" / "index.md"
    listed = re.findall(r"^- \[.*?\]\((\S+\.md)\)", index.read_text(), re.M)
    assert len(listed) == len(set(listed))
    assert set(PAGES) - {index} <= {(index.parent / each).resolve() for each in listed}


def test_every_program_of_the_cookbook_is_in_its_index() -> None:
    folder = ROOT / "docs" / "cookbook"
    linked = set(re.findall(r"\]\(cookbook/(\S+\.md#\S+)\)", folder.with_suffix(".md").read_text()))
    for page in sorted(folder.glob("*.md")):
        sections = re.findall(r"^## .*$", page.read_text(), re.M)
        assert sections
        for section in sections:
            (anchor,) = slugs(section)
            assert f"{page.name}#{anchor}" in linked


@pytest.mark.parametrize("package", [torch_bf16, plugin_api, lightning_bf16, accelerate_bf16])
def test_the_reference_has_every_public_name(package: ModuleType) -> None:
    name = package.__name__
    text = (ROOT / "docs" / "api" / f"{name.partition('.')[0]}.md").read_text()
    described = set(re.findall(rf"^\.\. auto\w+:: {name}(?:\.\w+)*\.(\w+)$", text, re.M))
    assert set(package.__all__) <= described


def constants(node: ast.AST) -> list[str]:
    """The literal text of a string, with a mark where a value goes."""
    if isinstance(node, ast.JoinedStr):
        parts = [each.value if isinstance(each, ast.Constant) else "\0" for each in node.values]
        return ["".join(map(str, parts))]
    return [node.value] if isinstance(node, ast.Constant) and isinstance(node.value, str) else []


@functools.cache
def messages() -> list[str]:
    """All texts of the packages, whatever says them."""
    rooms = ("kernels", "lightning_bf16", "accelerate_bf16")
    files = [file for room in rooms for file in (ROOT / room).rglob("*.py")]
    nodes = (node for file in files for node in ast.walk(ast.parse(file.read_text())))
    return [re.sub(r"%\.?\d*[sdfg]", "\0", text) for node in nodes for text in constants(node)]


QUOTES = re.findall(r"^#+ `(.*)`$", (ROOT / "docs" / "troubleshooting.md").read_text(), flags=re.M)


@pytest.mark.parametrize("quote", QUOTES)
def test_a_quoted_message_is_one_of_ours(quote: str) -> None:
    """`...` in a quotation stands for what a message fills in, or leaves out."""
    pieces = [piece.strip() for piece in quote.split("...") if piece.strip()]
    assert pieces
    assert any(all(piece in text for piece in pieces) for text in messages()), quote


class Widens(torch.nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight.float()


def remove_what_widens(cast: Callable[[torch.nn.Module], torch.nn.Module]) -> None:
    layer = cast(torch.nn.Linear(4, 4))
    parametrize.register_parametrization(layer, "weight", Widens(), unsafe=True)
    parametrize.remove_parametrizations(layer, "weight")


def register_two_hooks(cast: Callable[[torch.nn.Module], torch.nn.Module]) -> None:
    ddp = torch.nn.parallel.DistributedDataParallel(cast(torch.nn.Linear(4, 4)))
    for _ in range(2):
        ddp.register_comm_hook(None, lambda state, bucket: bucket)


OF_TORCH = {
    "mat1 and mat2": lambda cast: cast(torch.nn.Linear(4, 4))(torch.randn(2, 4)),
    "Input type": lambda cast: cast(torch.nn.Conv1d(4, 4, 1))(torch.randn(1, 4, 4)),
    "expected dtype": lambda cast: cast(torch.nn.Linear(4, 4)).weight.lerp(torch.ones(4, 4), 0.5),
    "Got unsupported": lambda cast: cast(torch.nn.Linear(4, 4)).weight.detach().numpy(),
    "Calling": remove_what_widens,
    "attempting": lambda cast: setattr(cast(torch.nn.Linear(4, 4)).bias, "grad", torch.ones(4)),
    "register_comm_hook": register_two_hooks,
}


@pytest.mark.parametrize("start", OF_TORCH)
@pytest.mark.usefixtures("one_rank")
def test_torch_says_what_is_quoted_as_its_message(start: str) -> None:
    text = (ROOT / "docs" / "troubleshooting.md").read_text()
    quotes = re.findall(r"^#+ `(.*)` \(torch's\)$", text, flags=re.M)
    assert len(quotes) == len(OF_TORCH)
    (quote,) = (each for each in quotes if each.startswith(start))
    if start == "attempting" and not hasattr(torch.Tensor, "grad_dtype"):
        pytest.skip("torch says so since 2.10")
    words = ".*".join(map(re.escape, quote.split("...")))
    with pytest.raises((RuntimeError, TypeError), match=words):
        OF_TORCH[start](torch_bf16.cast_model)


def test_messages_are_quoted() -> None:
    assert len(QUOTES) >= 25
