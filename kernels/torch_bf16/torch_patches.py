"""What this package replaces in torch itself, for the whole process, and how to turn that off.

:data:`PATCHES` lists the patches. Each is in the module of its subject, whose ``restore()`` undoes
it. What is replaced in Lightning, Accelerate, transformers and peft is listed in ``_patches`` of
the plugins.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass

__all__ = ["PATCHES", "SWITCH", "TorchPatch", "is_enabled", "restore"]

SWITCH = "TORCH_BF16_DISABLE_PATCHES"
"""The variable that turns patches off: ``all``, or their names with commas between them."""


@dataclass(frozen=True)
class TorchPatch:
    """One replacement in torch.

    Attributes:
        target: what is replaced.
        applied_by: the call, or the step, that first applies the patch.
        reason: what the patch is for.
        without: what happens if it is turned off.
        module: the module of this package whose ``restore()`` undoes it.
    """

    target: str
    applied_by: str
    reason: str
    without: str
    module: str


PATCHES: dict[str, TorchPatch] = {
    "optimizer_subclasses": TorchPatch(
        "torch.optim.Optimizer.__subclasses__",
        "import torch_bf16",
        "a program that looks optimizers up by name (LightningCLI's --optimizer AdamW, pykeen) "
        "finds torch's class alone",
        "it finds two classes named AdamW, and refuses the name",
        "torch_bf16.optim.subclass_listing",
    ),
    "optimizer_state_dict": TorchPatch(
        "state_dict and load_state_dict of torch.optim.Optimizer",
        "the first optimizer of this package",
        "an optimizer of another library that shares the states of the one that it wraps (SAM of "
        "pytorch_optimizer) saves and loads them as the wrapped one does",
        "such an optimizer rounds fp32 moments to bf16 as it loads them, and takes the bits beside "
        "a weight for numbers",
        "torch_bf16.optim.shared_states",
    ),
    "autocast_kernels": TorchPatch(
        "kernels of the dispatch keys AutocastCPU and AutocastCUDA for operations of aten that "
        "have none",
        "cast_model",
        "under autocast these operations take fp32 tensors beside bf16 weights",
        "such a call raises an error about two dtypes, and functions whose bf16 kernel is unsound "
        "(the matrix exponential on CPUs) return what that gives",
        "torch_bf16.model.autocast",
    ),
    "autocast_to_fp32": TorchPatch(
        "the same kernels of embeddings, norms, exponentials, sums and the like",
        "compute='fp32'",
        "what they compute from bf16 weights alone is fp32 under autocast to fp32",
        "it is bf16, and so are sums of embeddings",
        "torch_bf16.model.autocast",
    ),
    "dispatch_mode_enter": TorchPatch(
        "torch.utils._python_dispatch.TorchDispatchMode.__enter__",
        "cast_model",
        "the first mode, such as a FLOP counter, registers kernels of autocast for composite "
        "operations (einsum, RNNs), which such a mode receives whole in inference mode",
        "counting FLOPs in inference mode, these operations raise an error about two dtypes",
        "torch_bf16.model.composite_operations",
    ),
    "autocast_init": TorchPatch(
        "torch.autocast.__init__",
        "compute='fp32'",
        "activation checkpointing enters autocast to fp32 again, a dtype that torch refuses on "
        "CPUs",
        "a checkpointed forward of compute='fp32' fails when it is computed again",
        "torch_bf16.model.arithmetic",
    ),
    "autocast_exit": TorchPatch(
        "torch.autocast.__exit__",
        "cast_model",
        "errors about two dtypes name the bf16 weight that met another dtype, and the way out",
        "errors have torch's words alone",
        "torch_bf16.model.mixed_dtypes",
    ),
    "averaged_model": TorchPatch(
        "torch.optim.swa_utils.AveragedModel.update_parameters",
        "cast_model",
        "an fp32 average follows the bf16 weights of a cast model, and a warning names a bf16 one",
        "an fp32 average raises an error about two dtypes for most multi_avg_fn, and a bf16 one, "
        "which hardly moves, goes unnoticed",
        "torch_bf16.model.averaged_models",
    ),
    "foreach_lerp": TorchPatch(
        "torch._foreach_lerp_",
        "cast_model",
        "fp32 averages of other libraries (timm's, ultralytics') follow the bf16 weights of a cast "
        "model, and a warning names a bf16 one",
        "an fp32 average raises an error about two dtypes, and a bf16 one, which hardly moves, "
        "goes unnoticed",
        "torch_bf16.model.lerped_averages",
    ),
    "tensor_lerp": TorchPatch(
        "torch.Tensor.lerp_",
        "cast_model",
        "the same for averages that are moved one tensor after the other (ema-pytorch's, timm's "
        "with foreach=False)",
        "an fp32 average raises an error about two dtypes, and a bf16 one, which hardly moves, "
        "goes unnoticed for some steps",
        "torch_bf16.model.lerped_averages",
    ),
    "load_from_state_dict": TorchPatch(
        "torch.nn.Module._load_from_state_dict",
        "cast_model",
        "exact masters start from the fp32 weights that a cast model loads, not from rounded ones",
        "they start from the bf16 weights, unless fp32 weights are loaded before the cast",
        "torch_bf16.model.loading",
    ),
    "parameter_deepcopy": TorchPatch(
        "torch.nn.Parameter.__deepcopy__",
        "cast_model",
        "a warning names a bf16 copy of a cast model that a program blends with it, such as a "
        "plain average, which hardly moves",
        "such a copy goes unnoticed",
        "torch_bf16.model.blended_weights",
    ),
    "parameter_data": TorchPatch(
        "data and copy_ of torch.nn.Parameter, and of DTensor's parameters",
        "the first step with weights='bf16+16' or 'bf16+8'",
        "a write through p.data, which raises no version, or by p.copy_() drops the remainders of "
        "the numbers that it changes, and of no others",
        "numbers written through p.data keep the remainders of the old ones, up to half a bf16 "
        "spacing off; write under torch.no_grad(), p.copy_(...), instead, which then drops all "
        "remainders of the weight",
        "torch_bf16.engine.data_writes",
    ),
}
"""The patches, by the names that :data:`SWITCH` accepts."""


def is_enabled(name: str) -> bool:
    """Whether a patch may be applied.

    Raises:
        ValueError: :data:`SWITCH` names a patch that does not exist.

    Example:
        >>> is_enabled("autocast_exit")
        True
    """
    value = os.environ.get(SWITCH, "")
    disabled = {part.strip() for part in value.split(",") if part.strip()}
    if unknown := disabled - {"all", *PATCHES}:
        raise ValueError(
            f"{SWITCH}={value!r}: {', '.join(sorted(unknown))} is no patch of torch-bf16; use all, "
            f"or some of {', '.join(PATCHES)}"
        )
    return disabled.isdisjoint({"all", name})


def restore() -> None:
    """Undo every patch that was applied in this process; the next use applies it again.

    Example:
        >>> restore()
        >>> torch.autocast.__exit__.__module__
        'torch.amp.autocast_mode'
    """
    for name in {patch.module for patch in PATCHES.values()}:
        if module := sys.modules.get(name):
            module.restore()
