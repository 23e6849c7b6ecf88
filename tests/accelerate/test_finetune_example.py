"""The study of fine-tuning runs from end to end, and its verdicts can say no."""

from __future__ import annotations

import json

import pytest
import torch
from accelerate import Accelerator
from byte_llama import make_llama

pytest.importorskip("trl", minversion="1")
import huggingface_finetune as finetune

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

TINY = ["--seeds=1", "--steps=2", "--batch-size=2", "--context=8", "--width=16", "--layers=1"]


def test_every_trainer_trains_every_model_in_every_mode(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
    output = tmp_path / "record.json"
    steps, train = [], finetune.Trainer.train

    def count_steps(trainer):
        train(trainer)
        steps.append(trainer.state.global_step)

    monkeypatch.setattr(finetune.Trainer, "train", count_steps)
    sizes = ["--corpus-bytes=200000", "--validation-batches=2"]
    assert finetune.main([*TINY, *sizes, f"--output={output}"]) == 1
    record = json.loads(output.read_text())
    found = {(run["model"], run["trainer"], run["mode"]) for run in record["runs"]}
    assert len(found) == len(record["runs"]) == 2 * 2 * len(finetune.MODES)
    assert len(record["verdicts"]) == 12
    assert steps == [2] * (2 + 2 * 2 * len(finetune.MODES)), "with batches of any size"
    for mode in ("bf16-stochastic", "bf16-fp32-master"):
        assert sum(line.startswith(f"mixed_precision={mode}: ") for line in caplog.messages) == 4


@pytest.mark.parametrize("mode", ["bf16", "bf16-fp32-master"])
def test_validation_is_in_fp32_whatever_prepare_put_around_a_model(mode):
    model = make_llama(width=16, layers=1, context=9)
    windows = torch.randint(256, (2, 2, 9))
    for weight in model.parameters():
        weight.data = weight.data.bfloat16().float()
    in_fp32 = finetune.validation_loss(model, windows)
    prepared = Accelerator(mixed_precision=mode, cpu=True).prepare(model)
    assert finetune.validation_loss(prepared, windows) == in_fp32


@pytest.mark.parametrize(
    ("gaps", "expected"),
    [
        ((0.009, -0.009, 0.04), [True, True, True]),
        ((0.011, -0.011, 0.009), [False, False, False]),
    ],
)
def test_verdicts_follow_the_losses(gaps, expected):
    losses = dict(zip(finetune.MODES, (0.0, *gaps), strict=True))
    runs = [
        {"model": model, "trainer": trainer, "mode": mode, "seed": 0, "loss": 2.0 + gap}
        for model in ("llama", "qwen3")
        for trainer in ("trainer", "trl")
        for mode, gap in losses.items()
    ]
    found = finetune.verdicts(runs)
    assert [holds for holds, _ in found] == expected * 4
    assert ["NOT" not in sentence for _, sentence in found] == expected * 4
