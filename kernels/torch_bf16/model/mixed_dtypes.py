"""Errors of torch about tensors of two dtypes name the weight of a cast model that met another.

Where autocast is off, ``with torch.autocast("cuda", enabled=False): self.head(x.float())``, nothing
brings the two to one dtype, and torch says "mat1 and mat2 must have the same dtype". The error
passes ``__exit__`` of autocast contexts on its way out: of the inner one, and of the mode's own. If
the only context is a script's ``enabled=args.amp`` that is False, autocast itself is missing. A
model that computes without autocast has a context for these errors alone.

Autocast to bf16 knows bf16 and fp32: what is frozen in fp16 goes through its products, but not into
``torch.cat`` and its kin.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import torch
from torch import nn

from torch_bf16.parameters import parameters_in
from torch_bf16.torch_patches import Replacement

from .cast_modules import name_in_cast_model

__all__ = ["name_parts_in_errors", "name_weights_in_errors"]

_MIXED = re.compile(r"bfloat16|mixed dtype|same dtype|scalar ?type", re.IGNORECASE)
_NOT_JOINED = re.compile(r"at::autocast::prioritize")
_NO_KERNEL = re.compile(r"not implemented for 'BFloat16'|Low precision dtypes not supported")

_FP16 = torch.float16


def name_weights_in_errors() -> None:
    """Let errors about two dtypes name the weight of a cast model, and say what to do.

    For the whole process.
    """
    _AUTOCAST_EXIT.apply()


@contextmanager
def name_parts_in_errors() -> Iterator[None]:
    """Within the context, errors about two dtypes name the part of a cast model that they met in.

    For ``compute="bf16"``, where no autocast is on.
    """
    try:
        yield
    except RuntimeError as error:
        mixed = _MIXED.search(str(error)) and not _NO_KERNEL.search(str(error))
        if mixed and not hasattr(error, "_bf16_explained"):
            _explain_part(error)
        raise


def _explaining(original: Any) -> Any:
    def leave(
        self: Any, kind: Any, error: BaseException | None, trace: TracebackType | None
    ) -> Any:
        if isinstance(error, RuntimeError) and _MIXED.search(str(error)):
            _explain(error, trace, self)
        return original(self, kind, error, trace)

    return leave


_AUTOCAST_EXIT = Replacement("autocast_exit", torch.autocast, "__exit__", _explaining)


def _explain(error: RuntimeError, trace: TracebackType | None, context: Any) -> None:
    # Of nested contexts the innermost explains the error; only the outer ones know whether autocast
    # is on further out.
    words, is_off = getattr(error, "_bf16_explained", (str(error), True))
    if not is_off:
        return
    modules = [*_modules(trace)]
    if (half := _half_part(modules, words)) is not None:
        is_off = not (context._enabled and context.fast_dtype == torch.bfloat16)
        inside = hasattr(error, "_bf16_explained")
        _add(error, words, None if is_off else _said_of_half(half, off_inside=inside), is_off)
    elif (weight := _bf16_weight(modules)) is not None:
        module, name, device = weight
        is_off = _is_off_around(context, device)
        said = _said_of_weight(module, name, device, words, context, is_off)
        _add(error, words, said, is_off)


def _add(error: RuntimeError, words: str, said: str | None, is_off: bool) -> None:
    """End torch's words by others, which contexts further out may replace if autocast is off."""
    if said is not None:
        error.args = (f"{words.rstrip('.')}. {said}",)
    error._bf16_explained = words, is_off  # pyright: ignore[reportAttributeAccessIssue]


def _bf16_weight(modules: list[nn.Module]) -> tuple[nn.Module, str, str] | None:
    """The innermost weight of a cast model: its module, its name there, and its kind of device."""
    for module in reversed(modules):
        for name, p in module.named_parameters(recurse=False):
            if p.dtype == torch.bfloat16 and name_in_cast_model(module) is not None:
                return module, name, p.device.type
    return None


def _said_of_weight(
    module: nn.Module, name: str, device: str, words: str, context: Any, is_off: bool
) -> str:
    path = name_in_cast_model(module)
    pattern = path or f"*{name}"
    named = f"{'.'.join(filter(None, (path, name)))!r} of {type(module).__name__}"
    keep = (
        f"with the recipe's option keep_fp32=[{pattern!r}] (BF16_KEEP_FP32={pattern} for a "
        "launcher), or convert the tensor: "
    )
    if _NO_KERNEL.search(words):
        return (
            f"torch has no bfloat16 kernel for this function, and {named} is bfloat16, or "
            f"autocast made its input so. Keep a weight in fp32 {keep}x.float()"
        )
    met = f"{named} is a bfloat16 weight and met a tensor of another dtype"
    if is_off:
        return (
            f"{met}, and autocast, which brings the two together, is off: the only one around "
            f"this call has enabled=False. Call the model under torch.autocast({device!r}, "
            "torch.bfloat16), whatever the script's own option for mixed precision says, or let it "
            "carry autocast along: torch_bf16.carry_autocast(model)"
        )
    if context.device == device and context._enabled and context.fast_dtype == _FP16:
        return (
            f"{met}, because this autocast is to float16, as torch.autocast('cuda') is where it "
            f"names no dtype. Name bfloat16: torch.autocast({device!r}, torch.bfloat16), and leave "
            "out the GradScaler, or let the model carry its own autocast along: "
            "torch_bf16.carry_autocast(model)"
        )
    return (
        f"{met} where autocast does not bring them together, such as inside "
        f"autocast(enabled=False). Keep it in fp32 {keep}x.to(weight.dtype)"
    )


def _half_part(modules: list[nn.Module], words: str) -> nn.Module | None:
    """The part of a cast model, frozen in fp16, that an error is about; None if it is not."""
    for module in reversed(modules):
        # torch.cat may join what other modules have returned.
        met = {p.dtype for p in module.parameters(recurse=bool(_NOT_JOINED.search(words)))}
        if _FP16 in met and name_in_cast_model(module) is not None:
            # The part may have returned; else the outermost of those that the error passed through.
            parts = (m for m in (*modules, *module.modules()) if _is_half(m))
            return next(parts, module)
        if met:
            return None
    return None


def _is_half(module: nn.Module) -> bool:
    return {p.dtype for p in parameters_in(module)} == {_FP16}


def _said_of_half(half: nn.Module, off_inside: bool) -> str:
    path, kind = name_in_cast_model(half), type(half).__name__
    named = f"{path!r} ({kind})" if path else kind
    keep = f"keep it in fp32 by keep_fp32=[{path!r}] (BF16_KEEP_FP32={path} for a launcher)"
    keep = f", or {keep}" if path else ""
    if off_inside:
        return (
            f"{named} has float16 weights and met a tensor of another dtype inside "
            f"autocast(enabled=False). Convert the tensor (x.to(weight.dtype)){keep}"
        )
    return (
        f"{named} has float16 weights, which autocast to bfloat16 does not bring together with "
        "others. Make or load it in bfloat16, as a script's own option for bf16 often "
        f"does{keep}"
    )


def _explain_part(error: RuntimeError) -> None:
    for module in reversed([*_modules(error.__traceback__)]):
        path = name_in_cast_model(module)
        if path is not None:
            kind = type(module).__name__
            keep = f"Keep all of it in fp32 (keep_fp32=[{path!r}], or BF16_KEEP_FP32={path}), "
            said = (
                f"Tensors of two dtypes met in {f'{path!r} ({kind})' if path else kind}, and "
                "compute='bf16' casts only what modules with bfloat16 weights of their own are "
                f"given. {f'{keep}convert' if path else 'Convert'} the tensor there, or leave "
                "compute at 'autocast'"
            )
            _add(error, str(error), said, is_off=False)
            return


def _is_off_around(context: Any, device: str) -> bool:
    """Whether autocast is off inside the context that is being left, and was off before it, too."""
    if not torch.amp.is_autocast_available(device):
        return False
    before = context.device == device and context.prev
    return not (before or torch.is_autocast_enabled(device))


def _modules(trace: TracebackType | None) -> Iterator[nn.Module]:
    """The modules whose methods an error has passed through, the outermost first."""
    while trace is not None:
        owner = trace.tb_frame.f_locals.get("self")
        if isinstance(owner, nn.Module):
            yield owner
        trace = trace.tb_next
