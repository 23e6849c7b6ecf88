"""``export`` of what the hosts write: the exact weights of a folder, as the run has them."""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from test_accelerate_resume import start, train
from tiny_llm import llama, sequences
from torch import nn
from transformers import Trainer, TrainingArguments

import torch_bf16
from torch_bf16.tools import cli

# Of transformers' own making.
pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning:transformers"),
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*pin_memory.*:UserWarning"),
]

MODE = "bf16-fp32-master"


@pytest.fixture
def exported(tmp_path, capsys):
    """What the command makes of a folder."""

    def export(folder):
        target = tmp_path / "exact.pt"
        assert cli.main(["export", str(folder), str(target)]) == 0
        assert "from exact masters" in capsys.readouterr().out
        return torch.load(target)

    return export


def assert_exact(found, expected):
    # safetensors keeps one name of tied weights.
    assert found.keys() >= expected.keys() - {"also_middle.weight"}
    for name, value in found.items():
        assert value.dtype == expected[name].dtype != torch.bfloat16, name
        assert torch.equal(value, expected[name]), name
    exact = [each for each in found.values() if each.is_floating_point()]
    assert any((each != each.bfloat16().float()).any() for each in exact)


@pytest.mark.parametrize("safe", [True, False], ids=["safetensors", "bin"])
def test_a_folder_of_accelerate(make_accelerator, model, batches, tmp_path, exported, safe):
    accelerator, *objects = start(make_accelerator, MODE, type(model), tmp_path)
    train(accelerator, *objects, batches[:5])
    accelerator.save_state(str(tmp_path / "state"), safe_serialization=safe)
    assert_exact(exported(tmp_path / "state"), torch_bf16.fp32_state_dict(*objects[:2]))


def trained(model, folder):
    arguments = TrainingArguments(
        output_dir=str(folder), use_cpu=True, report_to=[], max_steps=2, save_steps=2
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=sequences())
    trainer.train()
    return trainer.model, trainer.optimizer.optimizer


def test_a_checkpoint_folder_of_the_trainer(tmp_path, monkeypatch, exported):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", MODE)
    run = trained(llama(), tmp_path / "run")
    assert_exact(exported(tmp_path / "run" / "checkpoint-2"), torch_bf16.fp32_state_dict(*run))


def test_a_checkpoint_folder_of_an_adapter(tmp_path, monkeypatch, exported, capsys):
    """PEFT saves without the adapter's name, by which the optimizer knows its parameters."""
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", MODE)
    lora = LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head"], r=4)
    model, optimizer = trained(get_peft_model(llama(), lora), tmp_path / "run")
    folder = tmp_path / "run" / "checkpoint-2"
    exact = torch_bf16.fp32_state_dict(model, optimizer)
    assert_exact(exported(folder), get_peft_model_state_dict(model, exact))
    assert cli.main(["doctor", str(folder)]) == 0
    assert "could not be told apart" not in capsys.readouterr().out


def test_two_models_in_a_folder_are_exported_one_by_one(
    make_accelerator, model, batches, tmp_path, exported, capsys
):
    accelerator = make_accelerator(MODE)
    models = nn.ModuleList([model, type(model)()])
    optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-2) for each in models]
    first, _, one, _ = accelerator.prepare(*models, *optimizers)
    train(accelerator, first, one, torch.optim.lr_scheduler.StepLR(one, 1), batches[:3])
    accelerator.save_state(str(tmp_path / "state"))
    assert cli.main(["export", str(tmp_path / "state"), str(tmp_path / "exact.pt")]) == 2
    assert "does not say which weights belong to which" in capsys.readouterr().err
    file, states = (tmp_path / "state" / n for n in ("model.safetensors", "optimizer.bin"))
    target = tmp_path / "one.pt"
    assert cli.main(["export", str(file), str(target), "--optimizer", str(states)]) == 0
    assert_exact(torch.load(target), torch_bf16.fp32_state_dict(first, one))
