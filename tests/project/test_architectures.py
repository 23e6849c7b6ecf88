"""The command that trains tiny models of transformers' architectures finds what disagrees."""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("transformers", minversion="5")
pytest.importorskip("resource", reason="bounds a process")
sys.path.append(str(Path(__file__).parents[1] / "proofs"))
import architectures

MASTER = "bf16-fp32-master"


def measured(name: str) -> architectures.Row:
    *_, row = architectures.stages(name)
    return row


@pytest.fixture(scope="module")
def row() -> architectures.Row:
    return {"name": "ernie4_5_moe", **measured("ernie4_5_moe")}


def test_a_language_model_with_experts_agrees_and_keeps_its_routers(row) -> None:
    assert architectures.disagreements(row) == []
    assert row["kept"]["ours"] == row["kept"]["theirs"] != []
    losses = row[MASTER]["losses"]
    assert losses[-1] < losses[0]


def test_a_model_of_images_agrees() -> None:
    row = measured("resnet")
    assert row["class"] == "ResNetForImageClassification"
    assert architectures.disagreements(row) == []


def test_what_disagrees_is_named(row, capsys) -> None:
    wrong = copy.deepcopy(row)
    wrong[MASTER]["losses"][-1] *= 1.1
    wrong[MASTER]["moved"]["model.embed_tokens.weight"] = 0.0
    wrong[MASTER]["warned"] = ["bf16 something"]
    wrong["kept"]["ours"] = wrong["kept"]["ours"][1:]
    found = "\n".join(architectures.disagreements(wrong))
    for each in ("is off by", "left 1 of", "warned: bf16 something", "kept in fp32"):
        assert each in found
    wrong["bf16-stochastic"] = {"failed": "RuntimeError: a"}
    assert architectures.report([wrong]) == 1
    assert "bf16-stochastic failed: RuntimeError: a" in capsys.readouterr().out


def test_losses_that_are_not_numbers_are_far(row) -> None:
    wrong = copy.deepcopy(row)
    wrong[MASTER]["losses"][0] = float("nan")
    assert architectures.far(wrong, MASTER)


def test_a_record_is_continued(row, tmp_path: Path, capsys) -> None:
    record = tmp_path / "record.jsonl"
    version = {"transformers": architectures.transformers.__version__}
    record.write_text(json.dumps(row | version) + "\n")
    assert architectures.main(["ernie4_5_moe", "--record", str(record)]) == 0
    assert "1 trained" in capsys.readouterr().out
    assert len(record.read_text().splitlines()) == 1


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_a_way_that_takes_too_long_is_ended_and_named(row, monkeypatch) -> None:
    def endless(name: str, seconds: float) -> Iterator[architectures.Row]:
        yield {key: row[key] for key in ("class", "has loss", "fp32", "autocast")}
        while True:
            pass

    monkeypatch.setattr(architectures, "stages", endless)
    late = architectures.bounded("ernie4_5_moe", 1)
    assert len(architectures.disagreements(late)) == 2
    assert "more than 1 s" in late[MASTER]["failed"]
