"""The table of versions says what was found, and the smoke test can fail."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "proofs"))
import compat
import compat_smoke

FOUND = {
    "versions": {"python": "3.10.1", "torch": "2.6.0", "lightning": None},
    "parts": {"plain PyTorch": "ok", "Lightning": "not installed", "Accelerate": "ValueError: a|b"},
    "date": "2026-01-02",
}


def test_a_row_says_what_was_found() -> None:
    row = compat.table({"core alone": FOUND}).splitlines()[-1]
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert cells[:4] == ["core alone", "3.10.1", "2.6.0", "-"]
    assert cells[6:9] == ["yes", "-", "**no**: ValueError: a/b"]
    assert cells[-1] == "2026-01-02"


def test_only_the_part_between_the_marks_is_written(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"before\n{compat.START}\nold\n{compat.END}\nafter\n")
    compat.write({"core alone": FOUND}, page)
    text = page.read_text()
    assert "old" not in text
    assert text.startswith("before\n")
    assert text.endswith("\nafter\n")
    compat.write({"core alone": FOUND}, page)
    assert page.read_text() == text


def test_the_page_shows_the_record() -> None:
    record = json.loads(compat.RECORD.read_text())
    assert compat.table(record) in compat.PAGE.read_text()
    assert set(record) <= {environment.name for environment in compat.environments()}


def test_a_checkout_is_not_an_installed_package(capsys: pytest.CaptureFixture[str]) -> None:
    assert "torch_bf16 comes from" in compat_smoke.outcome(compat_smoke.plain_pytorch, "torch")
    assert compat_smoke.outcome(compat_smoke.plain_pytorch, "no_such_package") == "not installed"


def test_an_unknown_environment_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        compat.main(["newest"])
    assert "there are oldest of all, oldest hosts" in capsys.readouterr().err
