"""The modules that an optimizer trains, found by its parameters, and what passes through them."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from torch_bf16.sharding import bare_name, is_whole

__all__ = ["ROUNDED", "Models", "Passing", "to_tf32"]

_KINDS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Embedding)
_NUMBERS = 1 << 16


def to_tf32(x: Tensor) -> Tensor:
    """Round fp32 to the 10 bits of fraction that TF32's products take, ties to even."""
    bits = x.view(torch.int32)
    rounded = bits + 0xFFF + ((bits >> 13) & 1)
    return torch.where(x.isfinite(), (rounded & ~0x1FFF).view(torch.float32), x)


ROUNDED: dict[str, Callable[[Tensor], Tensor]] = {
    "bf16": lambda x: x.bfloat16().float(),
    "tf32": to_tf32,
    "fp16": lambda x: x.half().float(),
}
"""What each format of products makes of fp32 numbers."""


@dataclass
class Passing:
    """What went through a module.

    Attributes:
        largest: of its outputs' absolute values.
        errors: of its outputs, root mean square relative to theirs, where inputs and weights are
            first rounded to a format of :data:`ROUNDED`; empty for modules without a product.
    """

    largest: float
    errors: dict[str, float]


class Models:
    """The outermost living modules that own some parameters.

    Attributes:
        roots: those modules.
        passing: what was seen of their parts, by name.
        measuring: whether their parts are looked at.
    """

    def __init__(self) -> None:
        self.roots: list[nn.Module] = []
        self.passing: dict[str, Passing] = {}
        self.measuring = False
        self._names: dict[int, str] = {}
        self._prefixes: list[str] = []
        self._handles: list[Any] = []

    def add(self, parameters: Sequence[Tensor]) -> None:
        """Look for the modules that own parameters."""
        wanted = {id(each) for each in parameters}
        # Not isinstance(), which asks lazy modules and proxies what they are.
        living = [x for x in gc.get_objects() if issubclass(type(x), nn.Module)]
        living = [x for x in living if "_modules" in vars(x)]
        parts = {id(y) for x in living for y in x._modules.values() if y is not None}
        for root in (x for x in living if id(x) not in parts):
            named = dict(root.named_parameters())
            new = any(id(p) in wanted for p in named.values()) and root not in self.roots
            if new:
                taken = {*self._names.values()} & {*map(bare_name, named)}
                prefix = f"{type(root).__name__}{len(self.roots) + 1}." if taken else ""
                self.roots.append(root)
                self._prefixes.append(prefix)
                for name, each in named.items():
                    self._names.setdefault(id(each), prefix + bare_name(name))

    def name_of(self, parameter: Tensor) -> str | None:
        """The name of a parameter in its model."""
        return self._names.get(id(parameter))

    def measure(self) -> None:
        """Look at what passes through the modules from now on."""
        self.measuring = True
        for root, prefix in zip(self.roots, self._prefixes, strict=True):
            for name, module in root.named_modules():
                if not module._modules:
                    hook = self._hook(prefix + bare_name(name) or type(module).__name__)
                    self._handles.append(module.register_forward_hook(hook))

    def release(self) -> None:
        """Look no more."""
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


def errors_of(module: nn.Module, inputs: Sequence[Any]) -> dict[str, float]:
    """What rounding inputs and weights does to a module's output, for each format.

    Args:
        module: whose output is a product, or rows of its weight; else nothing is measured.
        inputs: what it was called with; a part of the first dimension is used.
    """
    own = dict(module.named_parameters(recurse=False))
    known = isinstance(module, _KINDS) and inputs and isinstance(inputs[0], Tensor)
    if not known or not all(is_whole(p) and p.is_floating_point() for p in own.values()):
        return {}
    x = inputs[0].detach()
    if not x.numel():
        return {}
    x = x[: max(1, _NUMBERS * len(x) // x.numel())] if x.ndim > 1 else x
    floats = x.is_floating_point()

    def output(rounded: Callable[[Tensor], Tensor]) -> Tensor:
        given = rounded(x.float()) if floats else x
        weights = {name: rounded(p.detach().float()) for name, p in own.items()}
        return _output(module, given, weights["weight"], weights.get("bias"))

    with torch.autocast(x.device.type, enabled=False):
        exact = output(lambda each: each)
        size = exact.norm()
        if not bool(size.isfinite()) or not float(size):
            return {}
        found = {n: float((output(each) - exact).norm() / size) for n, each in ROUNDED.items()}
    # What is rounded already does not show what that has cost.
    return found if found["bf16"] else {}


def _output(module: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    # Not by calling it, which would call the hooks of others.
    if isinstance(module, nn.Embedding):
        return functional.embedding(x, weight)
    if isinstance(module, nn.Linear):
        return functional.linear(x, weight, bias)
    return module._conv_forward(x, weight, bias)
