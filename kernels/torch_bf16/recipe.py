"""Recipes: which format each number of an optimizer is stored in."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from .argument_checks import check_backend, check_compute
from .formats import BF16_PLUS_16, FP32, ROLES, Format

__all__ = [
    "ACCUMULATIONS",
    "OFFLOADS",
    "RECIPES",
    "REDUCTIONS",
    "VECTORS",
    "Recipe",
    "get_recipe",
    "label_of",
]

ACCUMULATIONS = ("bf16_nearest", "bf16_stochastic", "fp32")
"""Formats in which the gradients of several micro-batches can be summed."""

REDUCTIONS = ("wrapper", "bf16_wire")
"""How the gradients of bf16 parameters can be reduced over ranks."""

OFFLOADS = ("none", "states")
"""Which parts of an optimizer can live in host memory."""

VECTORS = ("exact", "like_matrices")
"""How bf16 parameters with at most one dimension can be kept."""

_CHOICES = {
    "accumulate": (ACCUMULATIONS, "is not a format for a sum of gradients"),
    "reduce": (REDUCTIONS, "is not a way to sum gradients over ranks"),
    "offload": (OFFLOADS, "does not say what is to live in host memory"),
    "vectors": (VECTORS, "is not a way to keep one-dimensional parameters"),
}
_NUMBERS = {"weights": "weights", "exp_avg": "first moments", "exp_avg_sq": "second moments"}


@dataclass(frozen=True)
class Recipe:
    """The formats of weights and moments, and which modules stay in fp32.

    A recipe is about bf16 parameters with two or more dimensions. Two kinds of parameters are
    never compressed: fp32 and complex64 ones keep everything in fp32, and bf16 ones with at most
    one dimension (norm gains, biases, under 0.1 % of a transformer) keep an exact fp32 master and
    fp32 moments, because near 1.0 a step of bf16 is 0.8 % and most updates are smaller than that;
    ``vectors`` changes the latter.

    Attributes:
        name: shown to users and stored in checkpoints.
        weights: format of the weights: ``bf16_stochastic`` (2 bytes per element), ``bf16+8``
            (3, a float of 24 bits, rounded stochastically: for learning rates that are too small
            for ``bf16_stochastic``), ``bf16+16`` (4, an exact fp32 master in two halves),
            ``bf16+fp32`` (6) or ``bf16_nearest`` (2, loses small updates; a control for
            experiments).
        exp_avg: format of first moments and momentum buffers: ``fp32`` (4 bytes),
            ``bf16_nearest`` or ``bf16_stochastic`` (2), or ``int8`` (1.06: one byte, and an fp32
            scale for each 64). Where a row, which is all dimensions but the first, is not a
            multiple of 64, the moments of an ``int8`` recipe are in bf16.
        exp_avg_sq: format of second moments; the same choices.
        accumulate: format of the sum of gradients of bf16 parameters while micro-batches add to it:
            ``bf16_nearest`` (torch's own, loses what is below 2^-9 of the sum), ``bf16_stochastic``
            (also 2 bytes) or ``fp32`` (4 bytes); see :func:`torch_bf16.accumulate_gradients`.
        reduce: how gradients of bf16 parameters are summed over ranks: ``wrapper``, as DDP or FSDP
            do, or ``bf16_wire``, sent in bf16 and summed in fp32; plain PyTorch calls
            :func:`torch_bf16.reduce_gradients` for it.
        offload: ``none``, or ``states``: moments, and the planes of a weight beyond the parameter,
            live in the host's pinned memory, and a step streams them through buffers of 128 MiB on
            the GPU. It changes no bit; state dicts do not record it, and are loaded to where the
            live recipe says. It does nothing for parameters that are in host memory themselves.
            Parameters of fewer than 65,536 elements, and Adafactor's rows and columns, stay whole
            on the GPU.
        keep_fp32: modules whose parameters are fp32 after ``cast_model``: shell-style patterns of
            qualified module names (``"lm_head"``, ``"*.router"``) or module classes. A pattern of
            parameter names (``"*.A_log"``) keeps only these; autocast handles their module.
        vectors: ``exact``, or ``like_matrices`` for bf16 parameters with at most one dimension in
            the formats of matrices, for a host that keeps both in one tensor (DeepSpeed's ZeRO).
        seed: seed of the rounding noise; must be the same on every replica.
        backend: name of the backend that takes the steps, ``"cpu"``, ``"triton"`` or ``"eager"``;
            None for what ``TORCH_BF16_BACKEND`` says, else the best that works. An optimizer's own
            ``backend=`` wins. It changes no bit, so recipes that differ in it are equal, and state
            dicts do not hold it.
        compute: what the model computes in: ``"autocast"`` to bf16; ``"fp32"``, over the same bf16
            weights, for CPUs whose bf16 products are slow; or ``"bf16"`` throughout. See
            :func:`torch_bf16.arithmetic`. It changes nothing that is stored, so recipes that differ
            in it are equal, too.

    Example:
        >>> Recipe("mine", weights="bf16+16", exp_avg_sq="bf16_stochastic").bytes_per_parameter
        8
    """

    name: str = "custom"
    weights: str = "bf16_stochastic"
    exp_avg: str = "bf16_nearest"
    exp_avg_sq: str = "bf16_stochastic"
    keep_fp32: tuple[str | type, ...] = ()
    seed: int = 0
    accumulate: str = "bf16_nearest"
    backend: str | None = field(default=None, compare=False)
    vectors: str = "exact"
    reduce: str = "wrapper"
    compute: str = field(default="autocast", compare=False)
    offload: str = "none"

    def __post_init__(self) -> None:
        if not isinstance(self.name, str):
            raise ValueError(f"name={self.name!r} must be a string")
        for role, known in ROLES.items():
            name = getattr(self, role)
            if not isinstance(name, str) or name not in known:
                raise ValueError(
                    f"{role}={name!r} {_fault(role, name)}; use one of {', '.join(known)}"
                )
        for option, (known, fault) in _CHOICES.items():
            if (value := getattr(self, option)) not in known:
                raise ValueError(f"{option}={value!r} {fault}; use one of {', '.join(known)}")
        if isinstance(self.keep_fp32, (str, type)):
            raise ValueError(
                f"keep_fp32={self.keep_fp32!r} must be a tuple of module name patterns or module "
                f"classes: keep_fp32=({self.keep_fp32!r},)"
            )
        keys = tuple(self.keep_fp32) if isinstance(self.keep_fp32, Iterable) else (None,)
        if not all(isinstance(key, (str, type)) for key in keys):
            raise ValueError(
                f"keep_fp32={self.keep_fp32!r} must be a tuple of module name patterns (str) or "
                'module classes, for example ("lm_head", torch.nn.LayerNorm)'
            )
        object.__setattr__(self, "keep_fp32", keys)
        if not isinstance(self.seed, int) or isinstance(self.seed, bool):
            raise ValueError(f"seed={self.seed!r} must be an int")
        check_backend(self.backend)
        check_compute(self.compute)

    @property
    def bytes_per_parameter(self) -> float:
        """Bytes of weight and AdamW moments per element, gradients not counted.

        An int if it is whole. For a matrix whose rows are whole blocks, as most are.
        """
        return sum(known[getattr(self, role)].bytes_per_element for role, known in ROLES.items())

    @property
    def label(self) -> str:
        """The name for messages, with the formats that differ from the recipe of that name.

        Example:
            >>> get_recipe("bf16-stochastic", weights="bf16+16").label
            'bf16-stochastic with weights=bf16+16'
        """
        return label_of(vars(self))

    def format_of(
        self, role: str, shape: Sequence[int], dtype: torch.dtype = torch.bfloat16
    ) -> Format:
        """The format of one number of a parameter.

        Args:
            role: ``"weights"``, ``"exp_avg"``, ``"exp_avg_sq"``; ``"exact"``, which is fp32
                always; or ``"iterate"``, a second sequence of weights beside the weights, which is
                fp32 if the weights have a master, and otherwise in their format.
            shape: shape of the whole parameter, not of the part that a rank holds.
            dtype: dtype of the parameter; any but a bf16 one keeps everything in fp32.

        Example:
            >>> get_recipe("bf16-stochastic").format_of("exp_avg_sq", (64, 64)).name
            'bf16_stochastic'
            >>> get_recipe("bf16-stochastic").format_of("weights", (64,)).name
            'bf16+16'
        """
        if role == "exact" or dtype != torch.bfloat16:
            return FP32
        if role == "iterate":
            weights = self.format_of("weights", shape)
            return weights if len(weights.planes) == 1 else FP32
        chosen = ROLES[role][getattr(self, role)]
        if len(shape) > 1 or self.vectors == "like_matrices":
            return chosen.fitting(shape)
        if role != "weights":
            return FP32
        # The control that is meant to lose updates loses them everywhere.
        return BF16_PLUS_16 if chosen.stochastic else chosen


def _fault(role: str, name: Any) -> str:
    """What is wrong with a format's name that the role does not have."""
    roles = [other for other, known in ROLES.items() if name in [*known]]
    if not roles:
        return "is unknown"
    if role == "weights":
        return "does not store bf16 weights"
    return f"is a format for {_NUMBERS[roles[0]]}"


def label_of(recipe: Mapping[str, Any]) -> str:
    """:attr:`Recipe.label` of a recipe's fields, of which a state dict has a part."""
    name = recipe["name"]
    named = RECIPES.get(name)
    changed = [
        f"{role}={recipe[role]}" for role in ROLES if named and recipe[role] != getattr(named, role)
    ]
    return f"{name} with {', '.join(changed)}" if changed else name


RECIPES: dict[str, Recipe] = {
    each.name: each
    for each in (
        Recipe("bf16-stochastic"),
        Recipe("bf16-fp32-master", weights="bf16+16", exp_avg="fp32", exp_avg_sq="fp32"),
    )
}
"""The named recipes, by their names."""


def get_recipe(recipe: str | Recipe, **overrides: Any) -> Recipe:
    """The recipe of that name, or the recipe itself, with ``overrides`` applied.

    Args:
        recipe: a name from :data:`RECIPES` or a :class:`Recipe`.
        **overrides: fields of :class:`Recipe` to replace.

    Raises:
        ValueError: the name or a field is unknown; the message lists the known ones.

    Example:
        >>> get_recipe("bf16-stochastic", weights="bf16+16", seed=7).weights
        'bf16+16'
    """
    if isinstance(recipe, str):
        if recipe not in RECIPES:
            raise ValueError(f"unknown recipe {recipe!r}; known recipes: {', '.join(RECIPES)}")
        recipe = RECIPES[recipe]
    elif not isinstance(recipe, Recipe):
        raise ValueError(
            f"recipe must be a name or a torch_bf16.Recipe, not {type(recipe).__name__}; "
            f"known recipes: {', '.join(RECIPES)}"
        )
    fields = {each.name for each in dataclasses.fields(Recipe)}
    if unknown := overrides.keys() - fields:
        raise ValueError(
            f"unknown recipe option {', '.join(sorted(unknown))}; known options: "
            + ", ".join(sorted(fields - {"name"}))
        )
    return dataclasses.replace(recipe, **overrides) if overrides else recipe
