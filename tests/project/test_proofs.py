"""Proofs, which take minutes, are described somewhere, and by themselves before they start."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROOFS = [
    file
    for file in sorted((ROOT / "tests" / "proofs").glob("*.py"))
    if "__main__" in file.read_text() and file.stem != "two_machines_worker"
]
TEXTS = [
    file.read_text()
    for folder, kind in (("docs", "*.md"), ("tests", "*.py"), ("kernels", "*.md"), ("", "*.md"))
    for file in (ROOT / folder).glob(kind if not folder else f"**/{kind}")
    if file not in PROOFS
]
each_proof = pytest.mark.parametrize("proof", PROOFS, ids=lambda proof: proof.stem)


@each_proof
def test_a_proof_is_named_where_a_reader_would_look(proof: Path) -> None:
    assert any(f"{proof.stem}.py" in text or f"import {proof.stem}" in text for text in TEXTS)


@each_proof
def test_a_proof_that_is_asked_for_help_does_not_start(proof: Path) -> None:
    assert re.search(r"\.parse(_\w+)?_args\(", proof.read_text())
