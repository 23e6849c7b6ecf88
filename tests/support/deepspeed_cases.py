"""What each rank finds out about DeepSpeed's ZeRO, several cases in one group of processes."""

from __future__ import annotations

import dataclasses
import hashlib
from typing import Any

import deepspeed_stall
import torch
from deepspeed_refusals import changed_recipe, parallel_refusals, refusals
from deepspeed_training import (
    LR,
    batch,
    config,
    digest,
    engine_of,
    model,
    optimizer_of,
    plain,
    start,
    train,
    weights,
)

import torch_bf16

CASES: dict[str, dict[str, Any]] = {
    "ZeRO-1": {"stage": 1},
    "ZeRO-2": {"stage": 2},
    "ZeRO-3": {"stage": 3},
    "sub-groups": {"stage": 3, "sub_group_size": 400},
    "round robin": {"stage": 2, "round_robin_gradients": True},
    "alignment": {"stage": 1, "parameter_alignment": True},
}
LIKE_MATRICES = dataclasses.replace(torch_bf16.RECIPES["bf16-stochastic"], vectors="like_matrices")


def inner(engine: Any) -> Any:
    """Our optimizer inside of an engine."""
    return engine.optimizer.optimizer


def flats(engine: Any) -> list[torch.Tensor]:
    zero = engine.optimizer
    stage3 = hasattr(zero, "fp32_partitioned_groups_flat")
    return zero.fp32_partitioned_groups_flat if stage3 else zero.single_partition_of_fp32_groups


def state_digest(engine: Any) -> str:
    """Of all states of this rank, and of their step numbers."""
    state = inner(engine).state
    bits = [
        (str(key), value.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        for flat in flats(engine)
        for key, value in sorted(dict.get(state, flat, {}).items())
    ]
    return hashlib.sha256(repr(bits).encode()).hexdigest()[:12]


def bits(cases: dict[str, Any], alike: bool = False, steps: int = 5) -> dict[str, str]:
    """The bits that training ends with, for each case and for one process without DeepSpeed."""
    import torch.distributed as dist

    found = {"plain": plain(range(steps), 1 if alike else dist.get_world_size())}
    for name, case in cases.items():
        engine = engine_of(config(**case))
        train(engine, range(steps), alike=alike)
        found[name] = digest(weights(engine))
    return found


def without_zero(steps: int = 5) -> dict[str, str]:
    """The bits that a plain engine and a pipeline of one stage end with; neither is attached."""
    import torch.distributed as dist

    found, deepspeed, rank = {}, start(), dist.get_rank()
    settings = {"train_micro_batch_size_per_gpu": 8}
    for name in ("engine", "pipeline"):
        module = model().bfloat16()
        optimizer = torch_bf16.AdamW(module.named_parameters(), lr=LR)
        named = dict(module.named_parameters())
        if name == "pipeline":
            module = deepspeed.pipe.PipelineModule(
                [*module], num_stages=1, loss_fn=lambda y, _: y.square().mean()
            )
        engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=settings)
        for step in range(steps):
            if name == "engine":
                train(engine, range(step, step + 1))
            else:
                engine.train_batch(iter([(batch(step, rank), torch.empty(0))]))
        found[name] = digest({key: each.detach() for key, each in named.items()})
    return found


def small_steps() -> dict[str, float]:
    """How far steps of 1e-5 go in a bare engine."""

    def train(way: str) -> Any:
        module, settings = deepspeed_stall.network(), deepspeed_stall.config(way, 1)
        if way == deepspeed_stall.OURS:
            made: Any = optimizer_of(module, way, lr=deepspeed_stall.LR)
            settings = torch_bf16.deepspeed_config(settings)
        else:
            made = torch.optim.AdamW(module.parameters(), lr=deepspeed_stall.LR)
        engine, *_ = start().initialize(model=module, optimizer=made, config=settings)
        if way == deepspeed_stall.OURS:
            torch_bf16.attach(engine)
        for x, y in deepspeed_stall.loader():
            engine.backward(torch.nn.functional.mse_loss(engine(x.bfloat16()), y.bfloat16()))
            engine.step()
        return engine

    return deepspeed_stall.ways(train)


def resumed(stage: int, recipe: Any, folder: Any) -> list[tuple[str, str]]:
    """Weights and states after 6 steps: in one run, and in two with a checkpoint in between."""
    found = []
    for cut in (None, 3):
        engine = engine_of(config(stage), recipe)
        train(engine, range(cut or 6))
        if cut is not None:
            engine.save_checkpoint(str(folder), tag="cut")
            engine = engine_of(config(stage), recipe)
            engine.load_checkpoint(str(folder), tag="cut")
            train(engine, range(cut, 6))
        found.append((digest(weights(engine)), state_digest(engine)))
    return found


def kept(stage: int) -> int:
    """Bytes of weights and states on this rank, between two steps."""
    whole = {"stage3_param_persistence_threshold": 0} if stage == 3 else {}
    engine = engine_of(config(stage, **whole))
    train(engine, range(1))
    tensors = [*engine.module.parameters(), *flats(engine)]
    tensors += [each.ds_tensor for each in engine.module.parameters() if stage == 3]
    for state in inner(engine).state.values():
        tensors += [each for key, each in state.items() if key != "step"]
    storages = [each.untyped_storage() for each in tensors]
    return sum({each.data_ptr(): each.nbytes() for each in storages}.values())


def alone(folder: Any) -> dict[str, Any]:
    """What is asked on one rank."""
    names, mode = ("ZeRO-1", "ZeRO-3"), "bf16-stochastic"
    return {
        "bits": bits({name: CASES[name] for name in names}),
        "small steps": small_steps(),
        "resumed": {f"ZeRO-{n}": resumed(n, mode, folder / f"{n}") for n in (2, 3)},
    }


def sizes(stage: int, recipe: Any) -> dict[str, Any]:
    """Bytes on this rank, and how many plans its steps have made."""
    engine = engine_of(config(stage), recipe)
    train(engine, range(3))
    state, own = inner(engine).state, flats(engine)
    tensors = [
        (each.numel() * each.element_size(), each.data_ptr())
        for flat in own
        for key, each in dict.get(state, flat, {}).items()
        if key != "step"
    ]
    if stage < 3:
        shared = [p.untyped_storage().data_ptr() for p in engine.module.parameters()]
    else:
        shared = [engine.optimizer.lp_param_buffer.untyped_storage().data_ptr()]
    return {
        "elements": sum(each.numel() for each in own),
        "bytes": sum(size for size, _ in tensors),
        "aliased": all(each.untyped_storage().data_ptr() in shared for each in own),
        "flats": len(own),
        "plans": state.replaced,
    }


def made_sharded() -> list[str]:
    """Bits with a model made under ``zero.Init``, whose parameters are empty, and without."""
    import torch.distributed as dist

    settings = config(3)
    with start().zero.Init(config_dict_or_path=torch_bf16.deepspeed_config(settings)):
        module = model()
    engine = engine_of(settings, module=module)
    initial = weights(engine)
    train(engine, range(5))
    without = plain(range(5), dist.get_world_size(), initial=initial)
    return [digest(weights(engine)), without]


def everything(folder: Any) -> dict[str, Any]:
    """All that is asked on two ranks."""
    exact = torch_bf16.RECIPES["bf16-fp32-master"]
    like = config(1)
    engine = engine_of(like, LIKE_MATRICES)
    train(engine, range(5))
    return {
        "bits": bits(CASES),
        "without ZeRO": without_zero(),
        "described": str(torch_bf16.describe(engine.module, inner(engine))),
        "like matrices": [digest(weights(engine)), plain(range(5), 2, LIKE_MATRICES)],
        "made sharded": made_sharded(),
        "resumed": {
            f"ZeRO-{stage} {recipe.name}": resumed(stage, recipe, folder / f"{stage}{recipe.name}")
            for stage, recipe in ((1, LIKE_MATRICES), (3, exact), (1, exact))
        },
        "sizes": {stage: sizes(stage, LIKE_MATRICES) for stage in (1, 3)},
        "kept": {stage: kept(stage) for stage in (1, 2, 3)},
        "refusals": {
            **refusals(),
            "recipe": changed_recipe(folder),
            # Last, because DeepSpeed keeps what it was told of parallelism.
            **parallel_refusals(),
        },
    }
