"""What this package replaces in torch itself, for the whole process, and how to turn that off.

:data:`PATCHES` lists the patches. The module of its subject applies each, by a
:class:`Replacement` or :class:`Kernels`. What is replaced in Lightning, Accelerate, transformers
and peft is listed in ``_patches`` of the plugins.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from weakref import WeakMethod, finalize

from torch.library import Library

from torch_bf16.locks import fork_safe_lock

__all__ = [
    "PATCHES",
    "SWITCH",
    "Kernels",
    "Replacement",
    "TorchPatch",
    "at_restore",
    "is_enabled",
    "restore",
]

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
    """

    target: str
    applied_by: str
    reason: str
    without: str


PATCHES: dict[str, TorchPatch] = {
    "optimizer_subclasses": TorchPatch(
        "torch.optim.Optimizer.__subclasses__",
        "import torch_bf16",
        "a program that looks optimizers up by name (LightningCLI's --optimizer AdamW, pykeen) "
        "finds torch's class alone",
        "it finds two classes named AdamW, and refuses the name",
    ),
    "optimizer_state_dict": TorchPatch(
        "state_dict and load_state_dict of torch.optim.Optimizer",
        "the first optimizer of this package",
        "an optimizer of another library that shares the states of the one that it wraps (SAM of "
        "pytorch_optimizer) saves and loads them as the wrapped one does",
        "such an optimizer rounds fp32 moments to bf16 as it loads them, and takes the bits beside "
        "a weight for numbers",
    ),
    "average_parameters": TorchPatch(
        "average_parameters in torch.distributed.algorithms.model_averaging.utils",
        "the first optimizer of this package",
        "PostLocalSGDOptimizer and model averagers average the fp32 numbers of weights, and "
        "masters keep all bits",
        "they average bf16 numbers, which are rounded to nearest, as a warning says where there "
        "are masters",
    ),
    "broadcast_states": TorchPatch(
        "_broadcast_state_dict in torch.distributed.checkpoint.state_dict",
        "the first state dict of an optimizer of this package, once that module is imported",
        "set_optimizer_state_dict with broadcast_from_rank0=True refuses, on all ranks, exact "
        "masters in another format than the optimizer's, as FSDP1 and other recipes save them",
        "rank 0 continues from the masters and all other ranks from bf16 weights, so that replicas "
        "differ",
    ),
    "optimizer_init": TorchPatch(
        "_init_optim_state in torch.distributed.checkpoint.state_dict",
        "accumulate='fp32'",
        "get_state_dict before the first step, which a run that resumes by DCP calls, makes states "
        "beside fp32 sums of gradients",
        "it raises torch's error about the dtype of a gradient",
    ),
    "autocast_kernels": TorchPatch(
        "kernels of the dispatch keys AutocastCPU and AutocastCUDA for operations of aten that "
        "have none",
        "cast_model",
        "under autocast these operations take fp32 tensors beside bf16 weights",
        "such a call raises an error about two dtypes, and functions whose bf16 kernel is unsound "
        "(the matrix exponential on CPUs) return what that gives",
    ),
    "autocast_to_fp32": TorchPatch(
        "the same kernels of embeddings, norms, exponentials, sums and the like",
        "compute='fp32'",
        "what they compute from bf16 weights alone is fp32 under autocast to fp32",
        "it is bf16, and so are sums of embeddings",
    ),
    "dispatch_mode_enter": TorchPatch(
        "torch.utils._python_dispatch.TorchDispatchMode.__enter__",
        "cast_model",
        "the first mode, such as a FLOP counter, registers kernels of autocast for composite "
        "operations (einsum, RNNs), which such a mode receives whole in inference mode",
        "counting FLOPs in inference mode, these operations raise an error about two dtypes",
    ),
    "autocast_init": TorchPatch(
        "torch.autocast.__init__",
        "compute='fp32'",
        "activation checkpointing enters autocast to fp32 again, a dtype that torch refuses on "
        "CPUs",
        "a checkpointed forward of compute='fp32' fails when it is computed again",
    ),
    "autocast_exit": TorchPatch(
        "torch.autocast.__exit__",
        "cast_model",
        "errors about two dtypes name the weight that met another dtype, and the way out",
        "errors have torch's words alone",
    ),
    "averaged_model": TorchPatch(
        "torch.optim.swa_utils.AveragedModel.update_parameters",
        "cast_model",
        "an fp32 average follows the bf16 weights of a cast model, and a warning names a bf16 one",
        "an fp32 average raises an error about two dtypes for most multi_avg_fn, and a bf16 one, "
        "which hardly moves, goes unnoticed",
    ),
    "foreach_lerp": TorchPatch(
        "torch._foreach_lerp_",
        "cast_model",
        "fp32 averages of other libraries (timm's, ultralytics') follow the bf16 weights of a cast "
        "model, and a warning names a bf16 one",
        "an fp32 average raises an error about two dtypes, and a bf16 one, which hardly moves, "
        "goes unnoticed",
    ),
    "tensor_lerp": TorchPatch(
        "torch.Tensor.lerp_",
        "cast_model",
        "the same for averages that are moved one tensor after the other (ema-pytorch's, timm's "
        "with foreach=False)",
        "an fp32 average raises an error about two dtypes, and a bf16 one, which hardly moves, "
        "goes unnoticed for some steps",
    ),
    "lit_ema": TorchPatch(
        "forward of modules that are LitEma of CompVis' latent-diffusion or copies of it",
        "cast_model",
        "the fp32 average that such a module keeps follows the bf16 weights of a cast model, and a "
        "warning names a bf16 one",
        "an fp32 average stays as it was made, without an error",
    ),
    "load_from_state_dict": TorchPatch(
        "torch.nn.Module._load_from_state_dict",
        "cast_model",
        "exact masters start from the fp32 weights that a cast model loads, not from rounded ones",
        "they start from the bf16 weights, unless fp32 weights are loaded before the cast",
    ),
    "parameter_deepcopy": TorchPatch(
        "torch.nn.Parameter.__deepcopy__",
        "cast_model",
        "a warning names a bf16 copy of a cast model that a program blends with it, such as a "
        "plain average, which hardly moves, or trains by an optimizer that was not converted",
        "such a copy goes unnoticed",
    ),
    "parameter_data": TorchPatch(
        "data and copy_ of torch.nn.Parameter, and of DTensor's parameters; _sync_module_states in "
        "torch.nn.parallel.distributed",
        "the first step with weights='bf16+16' or 'bf16+8', or an unpickled optimizer after it",
        "a write through p.data, which raises no version, by p.copy_() or by DDP, as it wraps a "
        "model or ends join(), drops the remainders of the numbers that it changes, and of no "
        "others, and a warning names a rank whose weights DDP has replaced during a run",
        "numbers written through p.data keep the remainders of the old ones, up to half a bf16 "
        "spacing off; write under torch.no_grad(), p.copy_(...), instead, which then drops all "
        "remainders of the weight, and so does wrapping it again in DDP",
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


class Replacement:
    """An attribute of torch that ours takes the place of, for the whole process.

    Other libraries replace the same attributes. Ours calls what is there when it is applied. What
    they put on top of it later stays there when ours is undone, and ours only passes calls on.

    Args:
        patch: the name of the patch.
        owner: the class or module with the attribute.
        attribute: its name.
        make: takes what is there and returns what takes its place: a function; or a descriptor,
            which acts as long as something else calls it.
    """

    def __init__(self, patch: str, owner: Any, attribute: str, make: Callable[[Any], Any]) -> None:
        self._patch, self._owner, self._attribute, self._make = patch, owner, attribute, make
        # Ours, each with what it took the place of. There are several if others lie in between.
        self._layers: list[tuple[Any, Any]] = []
        self._latest: Any = None
        undo = WeakMethod(self.undo)

        def undo_if_alive() -> None:
            if (method := undo()) is not None:
                method()

        # What is in a program's own class keeps this, and this must not keep the class.
        at_restore(undo_if_alive)
        finalize(self, _at_restore.remove, undo_if_alive).atexit = False

    def apply(self) -> None:
        """Put ours on top, unless it is there or the patch is turned off."""
        if self._top() is self._latest or not is_enabled(self._patch):
            return
        with _lock:
            top, known = self._top(), [ours for ours, _ in self._layers]
            if top in known:  # what was on top of it for a while is gone, with ours above that
                del self._layers[known.index(top) + 1 :]
            else:
                called = getattr(self._owner, self._attribute)
                ours = self._make(called)
                if callable(ours):
                    ours = self._passing_on(ours, called)
                setattr(self._owner, self._attribute, ours)
                self._layers.append((ours, top))
            self._latest = self._layers[-1][0]

    def undo(self) -> None:
        """Put back what was there before, until the next :meth:`apply`."""
        with _lock:
            for ours, before in reversed(self._layers):
                if self._top() is not ours:
                    continue
                if before is _ABSENT:
                    delattr(self._owner, self._attribute)
                else:
                    setattr(self._owner, self._attribute, before)
            self._layers.clear()
            self._latest = None

    def _top(self) -> Any:
        return vars(self._owner).get(self._attribute, _ABSENT)

    def _passing_on(self, acting: Callable[..., Any], called: Callable[..., Any]) -> Any:
        """A function that acts if it is the latest of ours, or on top once that is gone."""

        @functools.wraps(called)
        def ours(*args: Any, **kwargs: Any) -> Any:
            acts = self._latest is ours or (self._layers and self._top() is ours)
            return (acting if acts else called)(*args, **kwargs)

        return ours


class Kernels:
    """Kernels that torch's dispatcher lacks, registered for the whole process.

    Args:
        patch: the name of the patch.
        register: registers them in a library of aten.
    """

    def __init__(self, patch: str, register: Callable[[Library], None]) -> None:
        self._patch, self._register = patch, register
        # The registrations last as long as this object.
        self._library: Library | None = None
        at_restore(self.undo)

    def apply(self) -> None:
        """Register them, unless they are or the patch is turned off."""
        if self._library is not None or not is_enabled(self._patch):
            return
        with _lock:
            if self._library is not None:
                return
            library = Library("aten", "IMPL")
            try:
                self._register(library)
            except BaseException:
                library._destroy()
                raise
            self._library = library

    def undo(self) -> None:
        """Take them out again, until the next :meth:`apply`."""
        with _lock:
            if self._library is not None:
                self._library._destroy()
                self._library = None


_ABSENT: Any = object()
_lock = fork_safe_lock()
_at_restore: list[Callable[[], None]] = []


def at_restore(function: Callable[[], None]) -> None:
    """Call a function whenever the patches are undone."""
    _at_restore.append(function)


def restore() -> None:
    """Undo every patch that was applied in this process; the next use applies it again.

    Example:
        >>> restore()
        >>> torch.autocast.__exit__.__module__
        'torch.amp.autocast_mode'
    """
    for each in [*_at_restore]:
        each()
