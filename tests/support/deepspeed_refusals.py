"""What is refused in an engine of DeepSpeed, and what is said."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from deepspeed_training import config, engine_of, model, optimizer_of, start, train

import torch_bf16

REFUSED = (ValueError, NotImplementedError, RuntimeError)


def message(function: Callable[[], Any], kinds: Any = REFUSED) -> str:
    """What is said where something is refused."""
    try:
        function()
    except kinds as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was refused"


def unattached(stage: int) -> str:
    deepspeed, module = start(), model()
    engine, *_ = deepspeed.initialize(
        model=module,
        optimizer=optimizer_of(module, "bf16-stochastic"),
        config=torch_bf16.deepspeed_config(config(stage)),
    )
    return message(lambda: train(engine, range(1)))


def refused(
    settings: dict[str, Any], make: Callable[[Any], torch.optim.Optimizer], module: Any = None
) -> str:
    """What ``attach`` says of an engine that was set up in another way than is right."""
    deepspeed, module = start(), module or model()
    engine, *_ = deepspeed.initialize(
        model=module,
        optimizer=make(module),
        config={"zero_allow_untested_optimizer": True, **settings},
    )
    return message(lambda: torch_bf16.attach(engine))


def complex_model() -> torch.nn.Module:
    module = model()
    module.wave = torch.nn.Parameter(torch.ones(3, 3, dtype=torch.complex64))
    return module


def _with(**options: Any) -> Callable[[Any], torch.optim.Optimizer]:
    recipe = torch_bf16.get_recipe("bf16-stochastic", **options)
    return lambda module: optimizer_of(module, recipe)


def refusals() -> dict[str, str]:
    right = torch_bf16.deepspeed_config(config(1))
    fp32 = {**right, "data_types": {"grad_accum_dtype": "fp32"}}
    found = {
        "unattached ZeRO-1": unattached(1),
        "unattached ZeRO-3": unattached(3),
        "flags": refused(config(1), _with()),
        "fp32 sums": refused(fp32, _with()),
        "stage 0": message(lambda: refused(config(0), _with())),
        "no ZeRO": refused({"train_micro_batch_size_per_gpu": 8}, _with()),
        "torch": refused(right, lambda module: torch.optim.AdamW(module.parameters())),
        "mixed": refused(right, lambda module: torch_bf16.AdamW(module.parameters())),
        "int8": refused(right, _with(exp_avg="int8"), torch.nn.Linear(64, 4)),
        "keep_fp32": refused(right, _with(keep_fp32=("1",))),
        "complex": refused(right, _with(), complex_model()),
        "accumulate": refused(right, _with(accumulate="bf16_stochastic")),
        "Adafactor": refused(right, lambda module: torch_bf16.Adafactor(module.parameters())),
        "own step": refused(
            right, lambda module: torch_bf16.convert(torch.optim.Adadelta(module.parameters()))
        ),
        "Muon": refused(
            right, lambda module: torch_bf16.Muon(torch_bf16.param_groups(module, muon=True))
        ),
        "cautious": refused(
            right, lambda module: torch_bf16.AdamW(module.parameters(), cautious=True)
        ),
        "schedule-free": refused(
            right, lambda module: torch_bf16.AdamWScheduleFree(module.parameters())
        ),
        "no engine": message(lambda: torch_bf16.attach(model())),
    }
    engine = engine_of(right)
    optimizer = engine.optimizer.optimizer
    found["told"] = message(lambda: torch_bf16.clip_next_step(optimizer, 1.0))
    found["graphed"] = message(optimizer.graphed)
    release, add = torch_bf16.release_gradients, torch_bf16.accumulate_gradients
    found["release"] = message(lambda: release(engine.module, optimizer))
    found["sums"] = message(lambda: add(engine.module, optimizer, "fp32"))
    found["right"] = message(lambda: torch_bf16.attach(engine))
    return found


def changed_recipe(folder: Any) -> str:
    """What is said where a checkpoint is loaded into an engine with another recipe."""
    engine = engine_of(config(1), "bf16-fp32-master")
    train(engine, range(1))
    engine.save_checkpoint(str(folder), tag="other")
    other = engine_of(config(1))
    return message(lambda: other.load_checkpoint(str(folder), tag="other"))


class ModelParallel:
    """Megatron's description of the groups of two ranks, of which each has half of the model."""

    def __init__(self) -> None:
        self._alone = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]

    def get_model_parallel_world_size(self) -> int:
        return 2

    def get_model_parallel_rank(self) -> int:
        return dist.get_rank()

    def get_model_parallel_group(self) -> Any:
        return dist.group.WORLD

    def get_data_parallel_world_size(self) -> int:
        return 1

    def get_data_parallel_rank(self) -> int:
        return 0

    def get_data_parallel_group(self) -> Any:
        return self._alone


def parallel_refusals() -> dict[str, str]:
    """On two ranks."""
    deepspeed, settings = start(), torch_bf16.deepspeed_config(config(1))

    def refused(module: Any, groups: Any = None, **options: Any) -> str:
        made = torch_bf16.AdamW(groups or module.parameters(), lr=1e-3)
        engine, *_ = deepspeed.initialize(model=module, optimizer=made, config=settings, **options)
        return message(lambda: torch_bf16.attach(engine))

    experts = deepspeed.moe.layer.MoE(hidden_size=8, expert=torch.nn.Linear(8, 8), num_experts=2)
    split = deepspeed.moe.utils.split_params_into_different_moe_groups_for_optimizer
    groups = split({"params": [*experts.parameters()], "name": "all"})
    stages = deepspeed.pipe.PipelineModule(
        [torch.nn.Linear(8, 8), torch.nn.Linear(8, 1)], num_stages=2, loss_fn=torch.sum
    )
    return {
        "experts": refused(experts, groups),
        "pipeline": refused(stages),
        "mpu": refused(torch.nn.Linear(8, 8), mpu=ModelParallel()),
    }
