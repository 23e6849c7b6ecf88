"""Checks of DeepSpeed's configuration and engine: which options our optimizers can train under."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from typing import Any

import torch

from torch_bf16.errors import with_article

__all__ = ["FLAGS", "check_engine", "deepspeed_config"]

FLAGS = {
    "enabled": True,
    "bf16_master_weights_and_grads": True,
    "bf16_optimizer_states": True,
}
"""The options that the section ``bf16`` of a configuration must have."""

_ZERO = "zero_optimization"
_SECTIONS = f'"bf16": {json.dumps(FLAGS)}'

# Path of an option, the values with which it changes nothing, and what works instead.
_REFUSED: tuple[tuple[str, tuple[Any, ...], str], ...] = (
    (
        "optimizer",
        (None,),
        "DeepSpeed would make an optimizer of its own. Delete the section, and give "
        "deepspeed.initialize (or the host) an optimizer of torch.optim that was converted",
    ),
    ("fp16.enabled", (None, False), "the weights are bf16. Delete the section fp16"),
    (
        "torch_autocast.enabled",
        (None, False),
        "its weights stay in fp32. Delete the section torch_autocast",
    ),
    (
        "data_types.grad_accum_dtype",
        (None, "bf16", "bfloat16"),
        "DeepSpeed keeps fp32 masters then (ZeRO-1), or fp32 gradients. Delete the line",
    ),
    *(
        (
            f"{_ZERO}.{name}",
            (None, False, "none"),
            "DeepSpeed offloads its own DeepSpeedCPUAdam alone. Delete the line: states take 4 "
            "bytes per parameter divided by the ranks; or choose stage 3",
        )
        for name in ("cpu_offload", "offload_optimizer.device", "offload_param.device")
    ),
    *(
        (f"{_ZERO}.{name}", values, "it was not tried with these optimizers. Delete the line")
        for name, values in (
            ("zenflow", (None,)),
            ("zero_hpz_partition_size", (None, 1)),
            ("zero_quantized_weights", (None, False)),
            ("zero_quantized_gradients", (None, False)),
            ("zero_quantized_nontrainable_weights", (None, False)),
            ("mics_shard_size", (None, -1)),
        )
    ),
    (
        f"{_ZERO}.pipeline_loading_checkpoint",
        (None, False),
        "ranks compare what they load, at the same time. Delete the line",
    ),
    ("tensor_parallel.autotp_size", (None, 0, 1), "it was not tried. Delete the section"),
    ("compile.deepcompile", (None, False), "it was not tried. Delete the section"),
    (
        f"{_ZERO}.elastic_checkpoint",
        (None, False),
        "it saves states by names that these optimizers do not have. Delete the line",
    ),
)


def deepspeed_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration of DeepSpeed with the options that these optimizers need.

    These are the section ``bf16``, with masters and states in bf16, and permission for an optimizer
    that DeepSpeed does not know. For ``deepspeed.initialize``; see :func:`torch_bf16.attach`.

    Args:
        config: a configuration for ``deepspeed.initialize``, with ``"auto"`` where a host fills it
            in; only read.

    Returns:
        A new configuration.

    Raises:
        ValueError: a line contradicts these options, or no ZeRO stage is set.
        NotImplementedError: a line asks for something that cannot be trained, or was not tried.

    Example:
        >>> deepspeed_config({"zero_optimization": {"stage": 2}})["bf16"]["bf16_optimizer_states"]
        True
    """
    if not isinstance(config, Mapping):
        raise ValueError(
            f"deepspeed_config takes a dict, not {config!r}; read a file first: "
            "deepspeed_config(json.load(open(path)))"
        )
    config = copy.deepcopy(dict(config))
    for path, harmless, why in _REFUSED:
        value = _get(config, path)
        if isinstance(value, Mapping) and None in harmless and not value:
            continue
        if value not in harmless and value != "auto":
            raise NotImplementedError(_line(path, value) + f" cannot be used: {why}")
    stage = _get(config, f"{_ZERO}.stage")
    if stage not in (1, 2, 3, "auto"):
        fault = "is not set" if stage is None else f"is {stage!r}"
        raise ValueError(
            f"{_ZERO}.stage {fault} in DeepSpeed's configuration, and these optimizers train with "
            f'ZeRO: write "{_ZERO}": {{"stage": 1}}, 2 or 3. Without ZeRO use DDP and no DeepSpeed'
        )
    section = config["bf16"] = config.get("bf16") or {}
    if not isinstance(section, dict):
        raise ValueError(_line("bf16", section) + f" must be a section: write {_SECTIONS}")
    for name, value in FLAGS.items():
        if section.get(name, "auto") not in (value, "auto"):
            raise ValueError(
                _line(f"bf16.{name}", section[name])
                + f" would keep fp32 masters or states. Write {_SECTIONS}, or delete the line"
            )
        section[name] = value
    # DeepSpeed has a list of optimizers that it knows.
    config["zero_allow_untested_optimizer"] = True
    return config


def check_engine(engine: Any) -> Any:
    """DeepSpeed's optimizer around ours, after checks of its engine.

    Args:
        engine: the first object that ``deepspeed.initialize`` returned.

    Raises:
        ValueError: it is not an engine, has no optimizer, or was set up in another way.
        NotImplementedError: it does something that cannot be trained, or was not tried.
    """
    bases = [each.__name__ for each in type(engine).__mro__]
    if "DeepSpeedEngine" not in bases:
        raise ValueError(
            f"attach takes the engine that deepspeed.initialize returns first, not a "
            f"{type(engine).__name__}: engine, *_ = deepspeed.initialize(...)"
        )
    if isinstance(engine.optimizer, torch.optim.Optimizer):
        raise ValueError(
            f"attach was given an engine without ZeRO, whose {type(engine.optimizer).__name__} "
            "steps over the parameters themselves, as without DeepSpeed. Leave attach out, and "
            "call torch_bf16.prepare before deepspeed.initialize; or, to divide states among "
            "ranks, configure ZeRO by config=torch_bf16.deepspeed_config(config)"
        )
    if "PipelineEngine" in bases:
        raise NotImplementedError(
            "attach was given a PipelineEngine with ZeRO or a section bf16, which was not tried "
            f'with these optimizers. Delete the sections "{_ZERO}" and "bf16", cast the model by '
            "torch_bf16.prepare, and leave attach out; or give deepspeed.initialize a plain module"
        )
    trained = ((n, p) for n, p in engine.module.named_parameters() if p.requires_grad)
    if found := [name for name, parameter in trained if parameter.is_complex()]:
        raise NotImplementedError(
            f"parameter {found[0]!r} is complex, and DeepSpeed lays parameters into tensors of "
            "real numbers, which drops imaginary parts. Store it as torch.view_as_real(p) and let "
            "the forward pass call torch.view_as_complex, or train with DDP"
        )
    deepspeed_config(engine._config._param_dict)
    zero, section = engine.optimizer, engine._config.bfloat16_config
    missing = [f'"{name}": true' for name in FLAGS if not getattr(section, name)]
    if missing:
        raise ValueError(
            f"attach was given an engine without {', '.join(missing)}, which keeps fp32 masters: "
            f"write {_SECTIONS}, or config=torch_bf16.deepspeed_config(config)"
        )
    if getattr(engine, "has_moe_layers", False):
        raise NotImplementedError(
            "attach was given an engine with layers of deepspeed.moe, whose experts are cut among "
            "other ranks: that was not tried. Train it with DeepSpeed's own bf16"
        )
    if getattr(engine, "mp_world_size", 1) > 1:
        raise NotImplementedError(
            f"attach was given an engine with tensor parallelism over {engine.mp_world_size} "
            "ranks, which was not tried: leave out mpu, or use FSDP2 over tensor parallelism"
        )
    if type(zero).__name__ not in ("DeepSpeedZeroOptimizer", "DeepSpeedZeroOptimizer_Stage3"):
        raise NotImplementedError(
            f"attach was given an engine whose optimizer is {with_article(zero)}, which keeps "
            f"masters of its own or none: write {_SECTIONS} and "
            f'"{_ZERO}": {{"stage": 1}}, 2 or 3'
        )
    return zero


def _get(config: Mapping[str, Any], path: str) -> Any:
    value: Any = config
    for name in path.split("."):
        if not isinstance(value, Mapping):
            return None
        value = value.get(name)
    return value


def _line(path: str, value: Any) -> str:
    """A line of the configuration, as messages show it."""
    *sections, name = path.split(".")
    shown = "{...}" if isinstance(value, Mapping) else json.dumps(value, default=str)
    where = f" (in {'.'.join(sections)})" if sections else ""
    return f'"{name}": {shown}{where} of DeepSpeed\'s configuration'
