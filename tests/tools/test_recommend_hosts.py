"""``recommend`` on scripts of hosts, each in a process of its own."""

import json
import sys

import pytest
from forked_scripts import call_in_fork

from torch_bf16.tools import cli

LIGHTNING = """
import torch, lightning
from torch import nn

class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(32, 32)

    def training_step(self, batch, index):
        return (self.net(batch[0]) - 1).square().mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-6)

data = torch.utils.data.TensorDataset(torch.randn(512, 32))
trainer = lightning.Trainer(
    max_steps=300, accelerator="cpu", logger=False, enable_progress_bar=False,
    enable_checkpointing=False, enable_model_summary=False,
)
trainer.fit(Model(), torch.utils.data.DataLoader(data, batch_size=4))
print("NEVER HERE")
"""
TRAINER = """
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

model = LlamaForCausalLM(LlamaConfig(
    vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=1,
    num_attention_heads=2, num_key_value_heads=2,
))
tokens = [torch.randint(0, 64, (8,)) for _ in range(64)]
arguments = TrainingArguments(
    output_dir="run", max_steps=200, per_device_train_batch_size=2, learning_rate=1e-6,
    warmup_steps=50, use_cpu=True, report_to=[], disable_tqdm=True,
)
data = [{"input_ids": each, "labels": each} for each in tokens]
Trainer(model, arguments, train_dataset=data).train()
print("NEVER HERE")
"""


def recommend():
    sys.exit(cli.main(["recommend", "train.py", "-n", "8", "--json", "found.json"]))


@pytest.mark.parametrize(
    ("host", "module", "script", "steps", "first"),
    [
        ("lightning", "lightning", LIGHTNING, 300, "lightning_bf16"),
        ("trainer", "transformers", TRAINER, 200, "export BF16_MODE="),
    ],
)
def test_hosts_tell_their_steps_and_get_their_own_lines(
    host, module, script, steps, first, tmp_path
):
    pytest.importorskip(module)
    (tmp_path / "train.py").write_text(script)
    printed = call_in_fork(recommend, folder=tmp_path, CUDA_VISIBLE_DEVICES="")
    found = json.loads((tmp_path / "found.json").read_text())
    assert (found["host"], found["total_steps"]) == (host, steps)
    assert found["recommended"] in ("bf16+8", "bf16+16")
    assert first in found["lines"][0]
    assert "NEVER HERE" not in printed
    assert [each.name for each in tmp_path.rglob("*.safetensors")] == []
