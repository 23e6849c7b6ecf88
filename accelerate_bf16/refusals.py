"""What the modes cannot be combined with, and what to do instead.

Each function gets the requested mode and something to combine it with, which it only reads, and
raises ``ValueError`` or ``NotImplementedError`` if the two cannot be combined.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from .modes import LAUNCHER_VARIABLE, MODE_VARIABLE, REPLACEABLE, canonical

__all__ = [
    "explain_mixed_unit",
    "refuse_arguments",
    "refuse_data_parallel",
    "refuse_engine",
    "refuse_flat",
    "refuse_late_clipping",
    "refuse_late_optim",
    "refuse_left_behind",
    "refuse_release_under_deepspeed",
    "refuse_scripts_mode",
    "refuse_wrapped",
]

_ENGINES = {
    "MEGATRON_LM": "Megatron-LM brings a model and an optimizer of its own for fp16 and bf16 "
    "only, so that it would train in fp32 under this name",
    "XLA": "the updates have no XLA backend",
    "context parallelism": "its attention needs GPUs and has never run in this mode",
}


def refuse_engine(mode: str, engine: str) -> None:
    """Raise if a mode cannot train with an engine, a name of ``DistributedType``."""
    if engine in _ENGINES:
        raise NotImplementedError(
            f"mixed_precision={mode!r} cannot be combined with {engine}: {_ENGINES[engine]}. What "
            "works: one process, or several with DDP, which need no plugin; or this setup with "
            "mixed_precision='bf16'"
        )


def refuse_scripts_mode(mode: str, own: str) -> None:
    """Raise if ``BF16_MODE`` cannot replace the mode that a script names."""
    if own not in REPLACEABLE:
        raise ValueError(
            f"BF16_MODE={mode} cannot take the place of mixed_precision={own!r}, which the script "
            "names: it takes that of 'no' and 'bf16'. Have the script name one of these, or none; "
            f"or unset BF16_MODE (accelerate launch sets it) to train in {own!r}"
        )


def refuse_flat(mode: str, plugin: Any) -> None:
    """Raise if FSDP1's plugin would flatten parameters, which no mode can train."""
    if not plugin.use_orig_params:
        raise NotImplementedError(
            f"mixed_precision={mode!r} cannot train FSDP1's flat parameters "
            "(use_orig_params=False), which have one format for matrices and vectors. What works: "
            "use_orig_params=True, the option --fsdp_use_orig_params true of accelerate launch; or "
            "FSDP2, that is fsdp_version=2. Nothing was sharded"
        )


def explain_mixed_unit(mode: str, error: ValueError) -> None:
    """Raise an explanation if FSDP1 could not flatten a unit that is partly in fp32."""
    if "uniform dtype" in str(error):
        raise NotImplementedError(
            f"mixed_precision={mode!r} keeps some parameters in float32 (keep_fp32, batch norm, "
            "_keep_in_fp32_modules_strict, adapters), and FSDP1 flattens what lies in one unit in "
            f"one dtype ({error}). What works: FSDP2, fsdp_version=2, which gets groups for them; "
            "or an auto_wrap_policy that makes them units. The model is bfloat16 now and partly "
            "wrapped; create it again"
        ) from error


def refuse_left_behind(mode: str, optimizers: Iterable[Optimizer]) -> None:
    """Raise if wrapping a model has left its optimizers with parameters on the meta device."""
    from torch_bf16 import plugin_api

    for optimizer in optimizers:
        if any(p.is_meta for p in plugin_api.parameters_of(optimizer)):
            raise ValueError(
                f"mixed_precision={mode!r}: {type(optimizer).__name__} holds parameters on the "
                "meta device. FSDP1 has replaced them with those that the first rank sent "
                "(sync_module_states, cpu_ram_efficient_loading), and the optimizer would train "
                "nothing on this rank. Prepare the model first, and create the optimizer from what "
                "prepare returns. The model is wrapped and the optimizer is converted; create both "
                "again"
            )


def refuse_wrapped(mode: str, model: nn.Module) -> None:
    """Raise if DDP, or FSDP1 in another precision, has wrapped a model before ``prepare``."""
    # A run without a mode imports this file, and need not import that.
    from torch.distributed.fsdp import FullyShardedDataParallel

    if isinstance(model, DistributedDataParallel):
        raise ValueError(
            f"mixed_precision={mode!r} was given a model that is already wrapped in "
            "DistributedDataParallel; its gradient hooks would not survive the cast to bf16. Pass "
            "the bare model: prepare wraps it"
        )
    dtypes = {p.dtype for p in model.parameters()}
    if isinstance(model, FullyShardedDataParallel) and dtypes == {torch.float32}:
        raise ValueError(
            f"mixed_precision={mode!r} was given a model that is already wrapped in "
            "FullyShardedDataParallel (FSDP1) with float32 weights, as an Accelerator in another "
            "mode does it: they lie in flat tensors, which cannot be cast. Create the model again, "
            "and pass it bare: prepare wraps it. Nothing was prepared"
        )


def refuse_data_parallel(mode: str, arguments: Any) -> None:
    """Raise if a Trainer prepares only its optimizer, having put the model into DataParallel.

    Args:
        mode: the requested mode.
        arguments: the Trainer's arguments; None without a Trainer.
    """
    gpus = getattr(arguments, "n_gpu", 1)
    if gpus > 1:
        raise NotImplementedError(
            f"mixed_precision={mode!r}: this process sees {gpus} GPUs, and the Trainer wraps its "
            "model in nn.DataParallel, whose weights would stay in float32. What works: a process "
            f"for each GPU, by accelerate launch --num_processes {gpus} or torchrun; or one GPU "
            "alone, by CUDA_VISIBLE_DEVICES=0. Nothing was trained"
        )


def refuse_release_under_deepspeed(mode: str, release: bool | None) -> None:
    """Raise if gradients are to be released under DeepSpeed."""
    if release:
        raise NotImplementedError(
            f"release_gradients=True cannot be combined with mixed_precision={mode!r} under "
            "DeepSpeed, which reduces gradients and takes the step: leave it out (BF16_RELEASE_"
            "GRADIENTS in the environment). Nothing was prepared"
        )


def refuse_arguments(mode: str, arguments: Any, launched: str | None) -> None:
    """Raise if ``TrainingArguments`` contradict the mode, or the ``optim`` that names it."""
    optim = str(getattr(arguments.optim, "value", arguments.optim))
    if launched not in (None, mode):
        raise ValueError(
            f"optim={optim!r} trains in {mode!r}, and "
            f"the environment ({LAUNCHER_VARIABLE}, {MODE_VARIABLE}) asks for {launched!r}. Keep "
            "one of the two"
        )
    of_optim = getattr(arguments, "optim_args", None)
    if optim == f"adamw_{mode.replace('-', '_')}" and of_optim:
        raise ValueError(
            f"optim_args={of_optim!r} with optim={optim!r}: the Trainer passes none to "
            "this AdamW. Leave them out; set options of AdamW by Trainer(optimizer_cls_and_kwargs="
            f'(torch_bf16.AdamW, {{"recipe": {mode!r}, ...}})), those of the recipe by environment '
            "variables (BF16_...)"
        )
    for name in ("fp16", "fp16_full_eval"):
        if getattr(arguments, name, False):
            raise ValueError(
                f"{name}=True cannot be combined with mixed_precision={mode!r}: bf16 weights would "
                f"be turned into fp16 ones. Set {name}=False, or train without this mode"
            )


def refuse_late_optim(mode: str, arguments: Any) -> None:
    """Raise if ``optim`` was set when ``TrainingArguments`` had settled another precision."""
    own = getattr(arguments, "mixed_precision", None)
    if canonical(own) != mode:
        optim = str(getattr(arguments.optim, "value", arguments.optim))
        raise ValueError(
            f"optim={optim!r} trains in {mode!r}, and it was set after TrainingArguments had "
            f"settled mixed_precision={own!r}, in which the model would train instead. Name it "
            f"where they are created, TrainingArguments(optim={optim!r}, ...)"
        )


def refuse_late_clipping(arguments: Any) -> None:
    """Raise if ``TrainingArguments`` clip gradients that will have been released."""
    if arguments.max_grad_norm:
        raise ValueError(
            f"max_grad_norm={arguments.max_grad_norm} clips after the backward pass, and BF16_"
            "RELEASE_GRADIENTS takes the steps inside it, so that nothing would be left to clip. "
            "Set max_grad_norm=0; BF16_RELEASE_MAX_NORM=1.0 clips what is released, each parameter "
            "by its own norm or, with BF16_RELEASE_NORM=last_step, all by that of the step before"
        )
