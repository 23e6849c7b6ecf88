"""The rows of a comparison: precisions, and optimizers of other libraries."""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from torch_bf16.environment import options_from_environment
from torch_bf16.errors import described, with_article
from torch_bf16.prepare import prepare
from torch_bf16.recipe import RECIPES, Recipe, get_recipe
from torch_bf16.tools.factory import class_and_options, import_name

__all__ = [
    "DEFAULT",
    "FP32",
    "KNOWN",
    "MIXED",
    "Choice",
    "Row",
    "Trained",
    "also_argument",
    "choice_of",
    "rate_of",
    "row_of",
    "set_rate",
]

FP32, MIXED, TRUE = "32-true", "bf16-mixed", "bf16-true"
# Libraries whose classes of these names have torch's rule, and only store its numbers otherwise.
_LIBRARIES = (
    *("bitsandbytes", "flashoptim", "heavyball", "optimi", "pytorch_optimizer", "torchao"),
    "torchastic",
)
_SHARED = ("Adam", "AdamW")
# Options that do not change what a rule intends.
_OF_STORAGE = {
    *("bf16_stochastic_round", "consume_grad", "foreach", "fused", "kahan_sum", "triton"),
    *("master_weight_bits", "stochastic_rounding", "storage_dtype", "recipe", "backend"),
}
DEFAULT = (FP32, "bf16-fp32-master", "bf16-stochastic", TRUE)
KNOWN = (
    f"{FP32}, {MIXED}, {TRUE}, {', '.join(RECIPES)}, or three formats: those of weights, first and "
    "second moments, such as bf16+8/int8/int8"
)


@dataclass(frozen=True)
class Choice:
    """An optimizer by its class and options, as a user wrote it.

    Attributes:
        text: what the user wrote.
        make: the class, or a function that makes an optimizer.
        options: its arguments after the parameters; an ``lr`` among them overrides :meth:`over`'s.
    """

    text: str
    make: Any = field(compare=False)
    options: Mapping[str, Any]

    def over(self, model: nn.Module, lr: float) -> torch.optim.Optimizer:
        """Make the optimizer of a model's trainable parameters.

        Raises:
            ValueError: it cannot be made, or is not an optimizer.
        """
        parameters = [p for p in model.parameters() if p.requires_grad]
        try:
            optimizer = self.make(parameters, **{"lr": lr, **self.options})
        # Another library's optimizer may raise anything.
        except Exception as error:
            raise ValueError(f"{self.text} cannot be made: {described(error)}") from error
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise ValueError(f"{self.text} made {with_article(optimizer)}, not an optimizer")
        return optimizer


@dataclass(frozen=True)
class Row:
    """One way to train the model.

    Attributes:
        name: the row's name in tables.
        recipe: a recipe of this package; None for other precisions.
        dtype: the dtype that weights are cast to.
        autocast: whether the model computes in bf16 whatever its weights are.
        own: an optimizer that only this row has; None for the one that rows share.
    """

    name: str
    recipe: Recipe | None = None
    dtype: torch.dtype = torch.bfloat16
    autocast: bool = True
    own: Choice | None = None

    @property
    def description(self) -> str:
        """How the row is trained, in one line."""
        if self.own is not None:
            return f"bf16 weights, bf16 autocast, {self.own.text}"
        if self.recipe is None:
            weights = "fp32 weights" if self.dtype == torch.float32 else "bf16 weights, to nearest"
            return weights + (", bf16 autocast" if self.autocast else "")
        formats = (self.recipe.weights, self.recipe.exp_avg, self.recipe.exp_avg_sq)
        compute = "bf16 autocast" if self.autocast else f"{self.recipe.compute} compute"
        return f"{' / '.join(formats)}, {compute}"

    def prepare(
        self, model: nn.Module, make: Callable[[], torch.optim.Optimizer], seed: int
    ) -> Trained:
        """Cast a model and its optimizer, in place.

        Args:
            model: a model in fp32.
            make: makes the optimizer of its parameters. It is called when users would do so: before
                :func:`torch_bf16.prepare`, and after other casts.
            seed: the seed of the rounding noise.
        """
        if self.recipe is None:
            model.to(self.dtype)
        optimizer = make()
        kind, groups = type(optimizer), [dict(group) for group in optimizer.param_groups]
        if self.recipe is not None:
            prepare(model, optimizer, get_recipe(self.recipe, seed=seed))
        return Trained(self, model, optimizer, kind, groups)


@dataclass(frozen=True)
class Trained:
    """A model with its optimizer in one row's precision.

    Attributes:
        row: the row.
        model: the model, cast.
        optimizer: the optimizer of the model's parameters.
        kind: the optimizer's class before :func:`torch_bf16.prepare`.
        groups: the optimizer's groups before :func:`torch_bf16.prepare`.
    """

    row: Row
    model: nn.Module
    optimizer: torch.optim.Optimizer
    kind: type[torch.optim.Optimizer]
    groups: list[dict[str, Any]]

    @property
    def resumable(self) -> bool:
        """Whether a new optimizer can load the state dict without losing a bit."""
        return self.kind.__module__.startswith(("torch.optim.", "torch_bf16."))

    def cast_batch(self, batch: Any) -> Any:
        """A batch as the model takes it: in bf16 if the model has bf16 weights and no autocast.

        A model that a recipe has cast takes fp32 in every case.
        """
        if self.row.autocast or self.row.recipe is not None or self.row.dtype == torch.float32:
            return batch
        return tree_map_only(
            Tensor, lambda each: each.bfloat16() if each.is_floating_point() else each, batch
        )

    def twin(self, parameters: Mapping[nn.Parameter, nn.Parameter]) -> torch.optim.Optimizer:
        """The same optimizer over other, fp32 parameters, in the same groups.

        If it is torch's rule in the formats of another library, it is torch's, which rounds
        nothing.

        Args:
            parameters: the fp32 parameter in place of each trained one.
        """
        kind = self._plain_kind()
        takes = inspect.signature(kind).parameters
        groups = []
        for group in self.groups:
            options = {name: value for name, value in group.items() if name in takes}
            if "betas" in takes and "beta1" in group:
                options["betas"] = (group["beta1"], group["beta2"])
            options["lr"] = rate_of(group)
            params = [parameters[p] for p in group["params"] if p in parameters]
            groups.append({**options, "params": params})
        shared = {name: value for name, value in groups[0].items() if name != "params"}
        return kind(groups, **shared)

    def _plain_kind(self) -> type[torch.optim.Optimizer]:
        """Torch's class of the same rule, if it is known to have one that knows all its options."""
        name = re.sub("^(_|Flash)|(8bit|4bit|Fp8)$", "", self.kind.__name__)
        library = self.kind.__module__.partition(".")[0]
        known = library == "torch_bf16" or (library in _LIBRARIES and name in _SHARED)
        kind = getattr(torch.optim, name, None) if known else None
        if kind is None:
            return self.kind
        own = inspect.signature(self.kind).parameters
        unknown = own.keys() - inspect.signature(kind).parameters.keys() - _OF_STORAGE
        changed = any(
            group.get(n, own[n].default) != own[n].default for group in self.groups for n in unknown
        )
        return self.kind if changed else kind


def choice_of(text: str) -> Choice:
    """An optimizer by its name, torch's without a module: ``SGD(momentum=0.9)``.

    Raises:
        ImportError, ValueError: there is no such class, or options are not plain values.
    """
    name, options = class_and_options(text)
    module, _, last = name.rpartition(":" if ":" in name else ".")
    return Choice(text, import_name(f"{module or 'torch.optim'}:{last}"), options)


def row_of(name: str) -> Row:
    """The row of a precision, by its name.

    Raises:
        ValueError: the name is unknown; the message lists those that are known. Or
            ``BF16_COMPUTE`` is set to what is no way to compute.
    """
    if name in (FP32, MIXED):
        return Row(name, dtype=torch.float32, autocast=name == MIXED)
    if name == TRUE:
        return Row(name, autocast=False)
    if name in RECIPES:
        return _of_recipe(name, get_recipe(name))
    formats = [part.strip() for part in name.split("/")]
    if len(formats) == 3:
        weights, first, second = formats
        return _of_recipe(name, Recipe(name, weights=weights, exp_avg=first, exp_avg_sq=second))
    raise ValueError(f"unknown precision {name!r}; known ones: {KNOWN}")


def _of_recipe(name: str, recipe: Recipe) -> Row:
    """A row that computes in what ``BF16_COMPUTE`` names, as a host would."""
    asked = {"BF16_COMPUTE": os.environ.get("BF16_COMPUTE", "")}
    recipe = get_recipe(recipe, **options_from_environment(asked))
    return Row(name, recipe, autocast=recipe.compute == "autocast")


def also_argument(text: str) -> Row:
    """The row of ``NAME=module:Class(option=value)``: bf16 weights and that optimizer.

    Raises:
        ImportError, ValueError: the text does not have this form, or it names nothing.
    """
    name, equals, target = text.partition("=")
    if not equals or not name.strip() or not target or "(" in name:
        raise ValueError(f"--also {text!r} must be NAME=module:Class or NAME=module:Class(lr=...)")
    return Row(name.strip(), own=choice_of(target))


def rate_of(group: Mapping[str, Any]) -> float | None:
    """A group's learning rate; None where the optimizer finds its own."""
    # Some libraries make a tensor of it.
    return None if group["lr"] is None else float(group["lr"])


def set_rate(group: dict[str, Any], lr: float | None) -> None:
    """Set a group's learning rate, of which some libraries make a tensor; None leaves it."""
    if isinstance(group["lr"], Tensor) and lr is not None:
        group["lr"].fill_(lr)
    elif lr is not None:
        group["lr"] = lr
