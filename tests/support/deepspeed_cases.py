"""What each rank finds out about DeepSpeed's ZeRO, several cases in one group of processes."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable
from typing import Any

import torch
from deepspeed_training import (
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


def moved(steps: int = 100) -> dict[str, float]:
    """The share of matrix elements that small steps have moved, in three ways to store them."""
    right, shares = torch_bf16.deepspeed_config(config(1)), {}
    ways: dict[str, tuple[Any, Callable[[Any], torch.optim.Optimizer]]] = {
        "fp32 masters": (config(1), lambda each: torch.optim.AdamW(each.parameters(), lr=1e-5)),
        "bf16 to nearest": (right, lambda each: torch.optim.AdamW(each.parameters(), lr=1e-5)),
        "ours": (right, lambda each: optimizer_of(each, "bf16-stochastic", lr=1e-5)),
    }
    for name, (settings, make) in ways.items():
        module = model()
        first = {key: each.detach().bfloat16().clone() for key, each in module.named_parameters()}
        engine, *_ = start().initialize(
            model=module,
            optimizer=make(module),
            config={"zero_allow_untested_optimizer": True, **settings},
        )
        if name == "ours":
            torch_bf16.attach(engine)
        train(engine, range(steps))
        last = {key: each for key, each in weights(engine).items() if each.ndim > 1}
        changed = torch.cat([(each != first[key]).view(-1) for key, each in last.items()])
        shares[name] = changed.float().mean().item()
    return shares


def alone() -> dict[str, Any]:
    """What is asked on one rank."""
    names = ("ZeRO-1", "ZeRO-3")
    return {"bits": bits({name: CASES[name] for name in names}), "moved": moved()}


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
        "plans": state.plans,
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


def message(function: Callable[[], Any]) -> str:
    """What is said where something is refused."""
    try:
        function()
    except (ValueError, NotImplementedError, RuntimeError) as error:
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
        "no ZeRO": refused({**right, "zero_optimization": {"stage": 0}, "bf16": {}}, _with()),
        "torch": refused(right, lambda module: torch.optim.AdamW(module.parameters())),
        "mixed": refused(right, lambda module: torch_bf16.AdamW(module.parameters())),
        "int8": refused(right, _with(exp_avg="int8"), torch.nn.Linear(64, 4)),
        "keep_fp32": refused(right, _with(keep_fp32=("1",))),
        "accumulate": refused(right, _with(accumulate="fp32")),
        "Adafactor": refused(right, lambda module: torch_bf16.Adafactor(module.parameters())),
        "no engine": message(lambda: torch_bf16.attach(model())),
    }
    engine = engine_of(right)
    found["told"] = message(lambda: torch_bf16.clip_next_step(inner(engine), 1.0))
    found["graphed"] = message(inner(engine).graphed)
    release, add = torch_bf16.release_gradients, torch_bf16.accumulate_gradients
    found["release"] = message(lambda: release(engine.module, inner(engine)))
    found["sums"] = message(lambda: add(engine.module, inner(engine), "fp32"))
    found["right"] = message(lambda: torch_bf16.attach(engine))
    return found


def everything(folder: Any) -> dict[str, Any]:
    """All that is asked on two ranks."""
    exact = torch_bf16.RECIPES["bf16-fp32-master"]
    like = config(1)
    engine = engine_of(like, LIKE_MATRICES)
    train(engine, range(5))
    return {
        "bits": bits(CASES),
        "like matrices": [digest(weights(engine)), plain(range(5), 2, LIKE_MATRICES)],
        "made sharded": made_sharded(),
        "resumed": {
            f"ZeRO-{stage} {recipe.name}": resumed(stage, recipe, folder / f"{stage}{recipe.name}")
            for stage, recipe in ((1, LIKE_MATRICES), (3, exact), (1, exact))
        },
        "sizes": {stage: sizes(stage, LIKE_MATRICES) for stage in (1, 3)},
        "refusals": refusals(),
    }
