"""Find the modules that an optimizer trains, by its parameters, and measure what they compute."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from torch_bf16.living import instances_of
from torch_bf16.model.cast_modules import cast_recipes, is_of_cast_model
from torch_bf16.model.kept_fp32 import fp32_parameters
from torch_bf16.sharding import bare_name, is_whole

__all__ = ["ROUNDED", "Models", "Passing", "to_tf32"]

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_KINDS = (nn.Linear, nn.Embedding, *_CONVOLUTIONS)
_NUMBERS = 1 << 16


def to_tf32(x: Tensor) -> Tensor:
    """Round fp32 to TF32's 10 bits of fraction, ties to even."""
    bits = x.view(torch.int32)
    rounded = bits + 0xFFF + ((bits >> 13) & 1)
    return torch.where(x.isfinite(), (rounded & ~0x1FFF).view(torch.float32), x)


ROUNDED: dict[str, Callable[[Tensor], Tensor]] = {
    "bf16": lambda x: x.bfloat16().float(),
    "tf32": to_tf32,
    "fp16": lambda x: x.half().float(),
}
"""How each format of products rounds fp32 numbers."""


@dataclass
class Passing:
    """What was measured of a module's outputs.

    Attributes:
        largest: their largest absolute value.
        errors: their root mean square error, relative to their own size, if inputs and weights are
            first rounded to each format of :data:`ROUNDED`; empty for modules without a product.
    """

    largest: float
    errors: dict[str, float]


class Models:
    """The outermost living modules that own some parameters.

    Attributes:
        roots: the outermost modules.
        passing: what was measured of their submodules, by name.
        measuring: whether their submodules are being measured.
        kept: entries of ``keep_fp32`` by which they were cast.
    """

    def __init__(self) -> None:
        self.roots: list[nn.Module] = []
        self.passing: dict[str, Passing] = {}
        self.measuring = False
        self.kept: list[str | type] = []
        self._names: dict[int, str] = {}
        self._in_fp32: set[int] = set()
        self._prefixes: list[str] = []
        self._handles: list[Any] = []

    def add(self, parameters: Sequence[Tensor]) -> None:
        """Find the modules that own some parameters.

        Args:
            parameters: the parameters of one optimizer.
        """
        wanted = {id(each) for each in parameters}
        living = [x for x in instances_of(nn.Module) if "_modules" in vars(x)]
        parts = {id(y) for x in living for y in x._modules.values() if y is not None}
        for root in (x for x in living if id(x) not in parts):
            named = dict(root.named_parameters())
            new = any(id(p) in wanted for p in named.values()) and root not in self.roots
            if new:
                taken = {*self._names.values()} & {*map(bare_name, named)}
                prefix = f"{type(root).__name__}{len(self.roots) + 1}." if taken else ""
                self.roots.append(root)
                self._prefixes.append(prefix)
                self._in_fp32 |= _staying(root)
                keys = (key for recipe in cast_recipes(root) for key in recipe.keep_fp32)
                self.kept += [key for key in dict.fromkeys(keys) if key not in self.kept]
                for name, each in named.items():
                    self._names.setdefault(id(each), prefix + bare_name(name))

    def name_of(self, parameter: Tensor) -> str | None:
        """The name of a parameter in its model."""
        return self._names.get(id(parameter))

    def stays_fp32(self, parameter: Tensor) -> bool:
        """Whether a parameter is fp32 by every recipe."""
        return id(parameter) in self._in_fp32

    def measure(self) -> None:
        """Measure the outputs of submodules from now on."""
        self.measuring = True
        for root, prefix in zip(self.roots, self._prefixes, strict=True):
            for name, module in root.named_modules():
                # Modules of TorchScript take no hooks.
                if not module._modules and not isinstance(module, torch.jit.ScriptModule):
                    hook = self._hook(prefix + bare_name(name) or type(module).__name__)
                    self._handles.append(module.register_forward_hook(hook))

    def release(self) -> None:
        """Stop measuring."""
        while self._handles:
            self._handles.pop().remove()

    def _hook(self, name: str) -> Callable[..., None]:
        def after_forward(module: nn.Module, inputs: Any, output: Any) -> None:
            if not isinstance(output, Tensor) or not output.is_floating_point():
                return
            with torch.no_grad():
                largest = float(output.detach().abs().max()) if output.numel() else 0.0
                if name not in self.passing:
                    self.passing[name] = Passing(largest, errors_of(module, inputs))
                known = self.passing[name]
                known.largest = max(known.largest, largest)

        return after_forward


def _staying(root: nn.Module) -> set[int]:
    """Ids of the parameters that stay in fp32 if a model is cast, or did when it was cast."""
    staying = {id(p) for p in fp32_parameters(root).values()}
    if is_of_cast_model(root):
        staying |= {id(p) for p in root.parameters() if p.dtype == torch.float32}
    return staying


def errors_of(module: nn.Module, inputs: Sequence[Any]) -> dict[str, float]:
    """The error in a module's output from rounding its inputs and weights, for each format.

    Args:
        module: if its output is not a product, or rows of its weight, nothing is measured.
        inputs: its positional arguments; only a part of the batch is used.
    """
    if not isinstance(module, _KINDS) or not inputs or not isinstance(inputs[0], Tensor):
        return {}
    # No parameters, where a norm or a mask of weights makes them.
    tensors = {name: getattr(module, name, None) for name in ("weight", "bias")}
    tensors = {name: each.detach() for name, each in tensors.items() if each is not None}
    if not all(is_whole(each) and each.is_floating_point() for each in tensors.values()):
        return {}
    x = inputs[0].detach()
    if not x.numel():
        return {}
    # Without a batch, a convolution's input begins with its channels.
    unbatched_ndim = module.weight.ndim - 1 if isinstance(module, _CONVOLUTIONS) else 1
    x = x[: max(1, _NUMBERS * len(x) // x.numel())] if x.ndim > unbatched_ndim else x
    floats = x.is_floating_point()

    def output(rounded: Callable[[Tensor], Tensor]) -> Tensor:
        rounded_x = rounded(x.float()) if floats else x
        weights = {name: rounded(each.float()) for name, each in tensors.items()}
        return _output(module, rounded_x, weights["weight"], weights.get("bias"))

    with torch.autocast(x.device.type, enabled=False):
        try:
            exact = output(lambda each: each)
        # A subclass may multiply other shapes than its base.
        except RuntimeError:
            return {}
        size = exact.norm()
        if not bool(size.isfinite()) or not float(size):
            return {}
        found = {n: float((output(each) - exact).norm() / size) for n, each in ROUNDED.items()}
    # Without an error in bf16, numbers were already rounded, which hides what that has cost.
    return found if found["bf16"] else {}


def _output(module: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    # Calling the module would call other people's hooks.
    if isinstance(module, nn.Embedding):
        return functional.embedding(x, weight)
    if isinstance(module, nn.Linear):
        return functional.linear(x, weight, bias)
    return module._conv_forward(x, weight, bias)
