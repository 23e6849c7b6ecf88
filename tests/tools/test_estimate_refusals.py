"""What ``estimate`` refuses: options without effect, and models without anything to train."""

import json

import pytest

from torch_bf16.tools import cli

FACTORIES = """
import torch


def empty():
    return torch.nn.ReLU()


def frozen():
    return torch.nn.Linear(8, 8).requires_grad_(False)


class Unused(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(8))

    def forward(self, x):
        return x
"""


def refusal(capsys, *arguments):
    """What is said of a command that is refused."""
    assert cli.main(["estimate", *map(str, arguments)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    return err


def test_a_device_without_a_batch_has_no_effect(capsys):
    said = refusal(capsys, "1M", "--device", "cpu")
    assert "without --batch no step runs, which leaves --device without effect" in said


def test_a_reduction_without_ranks_has_no_effect(capsys):
    said = refusal(capsys, "1M", "--ranks", "1", "--reduce", "bf16_wire")
    assert "--ranks 1 sends nothing, which leaves --reduce without effect" in said


@pytest.mark.parametrize("name", ["empty", "frozen"])
def test_a_model_that_cannot_be_trained_has_no_table(name, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "untrained.py").write_text(FACTORIES)
    said = refusal(capsys, f"untrained.py:{name}")
    assert f"untrained.py:{name} is a model without trainable parameters" in said


def test_a_model_whose_output_needs_no_parameter_takes_no_step(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "untrained.py").write_text(FACTORIES)
    said = refusal(capsys, "untrained.py:Unused", "--batch", "8x7")
    assert "its output depends on no trainable parameter" in said


@pytest.mark.parametrize("own", [True, "x.Y", ["x.Y"], {"AutoModel": "x.Y"}])
def test_code_of_a_configs_own_is_named_whatever_it_is_written_as(own, capsys, tmp_path):
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"model_type": "llama", "auto_map": own}))
    example = " (AutoModel and so on)" if isinstance(own, dict) else ""
    assert f"names code of its own under 'auto_map'{example}, which" in refusal(capsys, config)
