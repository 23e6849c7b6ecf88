"""Accelerate and the Trainer with DeepSpeed: what each rank of ``ranks`` runs."""

from __future__ import annotations

import functools
import json
import os
from pathlib import Path
from typing import Any
from unittest.mock import patch

import deepspeed_stall
import torch
from deepspeed_cases import flats, inner, state_digest
from deepspeed_refusals import message
from deepspeed_saves import die
from deepspeed_training import digest, start, weights

MODE = "bf16-stochastic"


def _accelerator(mode: str | None = MODE, plugin: Any = None, **options: Any) -> Any:
    start()
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState
    from accelerate.utils import DeepSpeedPlugin, InitProcessGroupKwargs

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    if isinstance(plugin, dict):
        plugin = DeepSpeedPlugin(hf_ds_config=plugin)
    elif not plugin or isinstance(plugin, int):
        plugin = DeepSpeedPlugin(zero_stage=plugin or 2)
    # Without a GPU Accelerate has a backend only where one is named.
    handlers = [InitProcessGroupKwargs(backend="gloo"), *options.pop("kwargs_handlers", ())]
    return Accelerator(
        mixed_precision=mode, deepspeed_plugin=plugin, kwargs_handlers=handlers, **options
    )


def _parts() -> tuple[Any, ...]:
    """A script's model, optimizer, scheduler and loader; it knows nothing of us."""
    from torch.utils.data import DataLoader, TensorDataset

    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(8, 32), torch.nn.LayerNorm(32), torch.nn.ReLU(), torch.nn.Linear(32, 1)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 0.97**n)
    x = torch.randn(256, 8)
    loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=16)
    return model, optimizer, scheduler, loader


def _epochs(accelerator: Any, parts: tuple[Any, ...], epochs: int) -> list[float]:
    model, optimizer, scheduler, loader = parts
    losses = []
    for _ in range(epochs):
        for inputs, targets in loader:
            with accelerator.accumulate(model):
                loss = torch.nn.functional.mse_loss(model(inputs), targets)
                assert loss.dtype == torch.float32
                accelerator.backward(loss)
                norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
                assert norm is None or norm > 0
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            losses.append(loss.item())
    return losses


def script(stage: int, mode: str, **options: Any) -> dict[str, Any]:
    """A script as people have it."""
    accelerator = _accelerator(mode, stage, **options)
    parts = accelerator.prepare(*_parts())
    losses = _epochs(accelerator, parts, 2)
    engine = parts[0]
    groups = inner(engine).param_groups
    return {
        "mode": str(accelerator.mixed_precision),
        "bf16": accelerator.mixed_precision == "bf16",
        "optimizer": type(inner(engine)).__module__,
        "recipe": inner(engine).recipe.name,
        "learned": sum(losses[-4:]) < 0.95 * sum(losses[:4]),
        "lrs": {group["lr"] for group in groups} == {*parts[2].get_last_lr()},
        "decayed": groups[0]["lr"] < 1e-2,
        "aliased": [each.dtype for each in flats(engine)] == [torch.bfloat16] * len(flats(engine)),
        "weights": digest(weights(engine)),
    }


def resumed(stage: int, folder: Path) -> list[tuple[str, str]]:
    """Weights and states of two epochs, in one run and in two."""
    found = []
    for cut in (False, True):
        accelerator = _accelerator(MODE, stage)
        parts = accelerator.prepare(*_parts())
        _epochs(accelerator, parts, 1)
        if cut:
            accelerator.save_state(str(folder))
            accelerator = _accelerator(MODE, stage)
            parts = accelerator.prepare(*_parts())
            accelerator.load_state(str(folder))
        _epochs(accelerator, parts, 1)
        found.append((digest(weights(parts[0])), state_digest(parts[0])))
    return found


def small_steps(stage: int) -> dict[str, float]:
    """How far steps of 1e-5 go."""

    def train(way: str) -> Any:
        mode = MODE if way == deepspeed_stall.OURS else "bf16"
        accelerator = _accelerator(mode, deepspeed_stall.config(way, stage))
        model = deepspeed_stall.network()
        optimizer = torch.optim.AdamW(model.parameters(), lr=deepspeed_stall.LR)
        loader = deepspeed_stall.loader()
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        for x, y in loader:
            if mode == "bf16":
                x, y = x.bfloat16(), y.bfloat16()
            accelerator.backward(torch.nn.functional.mse_loss(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
        return model

    return deepspeed_stall.ways(train)


def from_a_file(folder: Path) -> str:
    """The mode and a file with ``auto`` values, both named by the launcher alone."""
    path = folder / "zero.json"
    path.write_text(
        json.dumps(
            {
                "zero_optimization": {"stage": 3},
                "bf16": {"enabled": "auto"},
                "fp16": {"enabled": "auto"},
                "train_micro_batch_size_per_gpu": "auto",
                "gradient_clipping": "auto",
            }
        )
    )
    from accelerate.commands.launch import launch_command_parser
    from accelerate.utils import DeepSpeedPlugin
    from accelerate.utils.launch import prepare_deepspeed_cmd_env

    own = ["--use_deepspeed", "--deepspeed_config_file", str(path), "--num_machines", "1"]
    given = [*own, "--num_processes", "2", "--mixed_precision", MODE, "script.py"]
    arguments = launch_command_parser().parse_args(given)
    arguments.deepspeed_fields_from_accelerate_config = ""
    launched = prepare_deepspeed_cmd_env(arguments)[1]
    with patch.dict(os.environ, {k: v for k, v in launched.items() if k.startswith("ACCELERATE_")}):
        start()
        accelerator = _accelerator(None, DeepSpeedPlugin())
    parts = accelerator.prepare(*_parts())
    _epochs(accelerator, parts, 1)
    return type(inner(parts[0])).__module__


def killed(folder: Path) -> None:
    """A run that saves its state twice into one folder, and of which a rank dies at its file."""
    accelerator = _accelerator()
    parts = accelerator.prepare(*_parts())
    for number in range(2):
        _epochs(accelerator, parts, 1)
        if number == 1 and torch.distributed.get_rank() == 1:
            torch.save = die
        accelerator.save_state(str(folder))


def after_kill(folder: Path) -> str:
    """What is said of the folder that :func:`killed` left."""
    accelerator = _accelerator()
    accelerator.prepare(*_parts())
    return message(lambda: accelerator.load_state(str(folder)))


def _refusal(zero: dict[str, Any], **others: Any) -> str:
    config = {"train_micro_batch_size_per_gpu": 16, "zero_optimization": zero, **others}
    return message(lambda: _accelerator(MODE, config))


def _kept() -> None:
    from accelerate_bf16 import BF16RecipeKwargs

    accelerator = _accelerator(kwargs_handlers=[BF16RecipeKwargs(keep_fp32=("1",))])
    accelerator.prepare(*_parts())


def _released() -> None:
    from accelerate_bf16 import BF16RecipeKwargs

    accelerator = _accelerator(kwargs_handlers=[BF16RecipeKwargs(release_gradients=True)])
    accelerator.prepare(*_parts())


def refusals() -> dict[str, str]:
    stage = {"stage": 2}
    return {
        "contradiction": _refusal(stage, bf16={"enabled": True, "bf16_optimizer_states": False}),
        "disabled": _refusal(stage, bf16={"enabled": False}),
        "fp32 sums": _refusal(stage, data_types={"grad_accum_dtype": "fp32"}),
        "offload": _refusal({**stage, "offload_optimizer": {"device": "cpu"}}),
        "offloaded weights": _refusal({"stage": 3, "offload_param": {"device": "nvme"}}),
        "optimizer": _refusal(stage, optimizer={"type": "AdamW", "params": {"lr": 1e-3}}),
        "no ZeRO": _refusal({"stage": 0}),
        "tensor parallelism": _refusal(stage, tensor_parallel={"autotp_size": 2}),
        "ZeRO++": _refusal({"stage": 3, "zero_quantized_weights": True}),
        "keep_fp32": message(_kept),
        "released": message(_released),
    }


def trainer(stage: int, folder: Path) -> dict[str, Any]:
    """The Trainer with ``optim`` and a configuration as its documentation has it, and resumed."""
    start()
    from accelerate.state import AcceleratorState, GradientState, PartialState
    from tiny_llm import llama, sequences
    from transformers import Trainer, TrainingArguments, training_args

    # Without a GPU the arguments have no backend, and one process.
    training_args.PartialState = functools.partial(PartialState, backend="gloo")
    config = {
        "zero_optimization": {"stage": stage},
        "bf16": {"enabled": "auto"},
        "train_micro_batch_size_per_gpu": "auto",
        "train_batch_size": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
    }

    def run(steps: int, where: str, resume: Any = None) -> Any:
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        arguments = TrainingArguments(
            output_dir=str(folder / where),
            deepspeed=config,
            optim="adamw_bf16_stochastic",
            per_device_train_batch_size=4,
            gradient_accumulation_steps=2,
            learning_rate=1e-2,
            lr_scheduler_type="constant",
            max_steps=steps,
            save_steps=4,
            logging_steps=1,
            report_to=[],
            disable_tqdm=True,
        )
        torch.manual_seed(0)
        made = Trainer(model=llama(), args=arguments, train_dataset=sequences())
        made.train(resume_from_checkpoint=resume)
        return made

    whole = run(8, "whole")
    run(4, "cut")
    cut = run(8, "cut", str(folder / "cut" / "checkpoint-4"))
    losses = [each["loss"] for each in whole.state.log_history if "loss" in each]
    return {
        "optimizer": type(inner(whole.deepspeed)).__module__,
        "learned": losses[-1] < losses[0],
        "weights": [digest(weights(each.deepspeed)) for each in (whole, cut)],
        "states": [state_digest(each.deepspeed) for each in (whole, cut)],
    }


def everything(folder: Path) -> dict[str, Any]:
    rank = torch.distributed.get_rank()
    found = {
        "scripts": {
            f"ZeRO-{stage} {mode}": script(stage, mode)
            for stage, mode in ((1, MODE), (2, "bf16-fp32-master"), (3, MODE))
        },
        "accumulated": script(2, MODE, gradient_accumulation_steps=2),
        "resumed": {stage: resumed(stage, folder / str(stage)) for stage in (1, 3)},
        "small steps": small_steps(2),
        "after kill": after_kill(folder / "killed"),
        "file": from_a_file(_made(folder / f"rank{rank}")),
        "refusals": refusals(),
    }
    return found


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder
