"""Judge which recipe loses nothing, by the noise that it adds to what is learned.

Stochastic rounding preserves the mean of a run's updates and adds noise; ``S`` is drift over noise,
squared (:mod:`.updates`). If the loss is as curved along the noise as along the drift, and the run
goes all the way to where the loss is lowest, noise takes back

    lost = noise^2 / drift^2 = 1 / S

of the improvement, and less if the run ends before that. So 99.8 % of the improvement need

    S >= 500

of all matrices together, and each layer must move by the 50 spacings below which noise is more than
a seventh of what it learns (docs/numerics.md). A format with ``b`` bits more than bf16 has spacings
that are ``2^b`` times finer and an ``S`` that is ``2^b`` times larger. ``S`` is proportional to the
learning rates, so a recipe begins to lose when they are ``500 / S`` times what they were.

Compared with measurements (examples/results): ``bf16-stochastic`` reached 99.73 % or less at the
rates of the sweep, where ``S`` is 110 or less, and 99.69 % at 3e-4, where ``S`` is 286. At 1e-3,
where ``S`` is 772, it reached 99.78 % of what exact masters did, give or take 0.22 %. At much lower
rates, losses are smaller than 1 / S, because those runs end long before the loss is lowest.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch_bf16.recipe import Recipe, get_recipe
from torch_bf16.tools.sampling import layer_of

from .updates import Layer, ParameterSums

__all__ = [
    "CANDIDATES",
    "DISTANCE",
    "LAYER_DISTANCE",
    "LEARNED",
    "Candidate",
    "Verdict",
    "candidates",
    "judge",
]

LEARNED = 0.998
"""Share of the improvement below which a recipe is said to lose."""

DISTANCE = 1 / (1 - LEARNED)
"""The least ``S`` of all matrices together."""

LAYER_DISTANCE = 50.0
"""The least ``S`` of each layer."""


@dataclass(frozen=True)
class Candidate:
    """A recipe and what it would do to this training.

    Attributes:
        name: the recipe's name for users.
        mode: the mode that it is derived from.
        options: the options in which it differs from that mode.
        distance: ``S`` of all matrices together.
        worst: the layer with the smallest ``S``, and this ``S``; None without matrices.
    """

    name: str
    mode: str
    options: dict[str, Any]
    distance: float
    worst: tuple[str, float] | None

    @property
    def recipe(self) -> Recipe:
        """The recipe."""
        return get_recipe(self.mode, **self.options)

    @property
    def noise(self) -> float:
        """Noise over drift: noise as a share of what is learned."""
        return self.distance**-0.5

    @property
    def needed(self) -> float:
        """How many times larger the learning rates would have to be for it to lose nothing."""
        worst_layer = 0.0 if self.worst is None else LAYER_DISTANCE / self.worst[1]
        return max(DISTANCE / self.distance, worst_layer)

    @property
    def loses(self) -> bool:
        """Whether it loses more than 1/500 of the improvement, or too much in one layer."""
        return self.needed > 1


@dataclass(frozen=True)
class Verdict:
    """The recipe to train with, and how it was chosen.

    Attributes:
        chosen: the smallest recipe that loses nothing.
        candidates: all recipes that were judged, the smallest first.
        layers: matrices that can lose first, by increasing ``S`` in bf16, then what is exact.
        everything: all matrices and vectors together.
    """

    chosen: Candidate
    candidates: list[Candidate]
    layers: list[Layer]
    everything: Layer


CANDIDATES: dict[str, tuple[str, dict[str, str]]] = {
    "bf16-stochastic": ("bf16-stochastic", {}),
    "bf16+8": ("bf16-stochastic", {"weights": "bf16+8"}),
    "bf16+16": ("bf16-stochastic", {"weights": "bf16+16"}),
    "bf16-fp32-master": ("bf16-fp32-master", {}),
}
"""Modes and options by name. Those with int8 moments are left out: S says nothing of moments."""


def candidates(matrices: Layer, layers: list[Layer]) -> list[Candidate]:
    """Judge every recipe.

    Args:
        matrices: all matrices together.
        layers: the same matrices, layer by layer.
    """
    found = []
    for name, (mode, options) in CANDIDATES.items():
        format_ = get_recipe(mode, **options).weights
        distances = [(each.name, each.distance(format_)) for each in layers if each.moves]
        worst = min(distances, key=lambda each: each[1], default=None)
        distance = matrices.distance(format_) if matrices.moves else math.inf
        found.append(Candidate(name, mode, options, distance, worst))
    return found


def judge(parameters: list[ParameterSums], held: Mapping[str, int] | None = None) -> Verdict:
    """Choose a recipe.

    Args:
        parameters: what was observed of each parameter, and the length of the run.
        held: the bytes that each recipe holds, by its name; None for those of AdamW.

    Raises:
        ValueError: nothing moves, so that nothing can be lost.
    """
    everything = Layer("all weights", tuple(parameters))
    if not parameters or not everything.moves:
        raise ValueError(
            "no weight would move: every update that was observed is exactly 0. The learning rate "
            "is 0 there (a longer warm-up than --steps?), or no gradient reaches a weight"
        )
    by_layer: dict[tuple[bool, str], list[ParameterSums]] = defaultdict(list)
    for each in parameters:
        by_layer[each.is_exact, layer_of(each.name)].append(each)
    matrices, exact = [], []
    for (is_exact, module), members in by_layer.items():
        name = module
        if (not is_exact, module) in by_layer:
            # A layer with parameters of both kinds has a row for each.
            last_parts = [each.name.rpartition(".")[2] for each in members]
            name = f"{module}.{' + '.join(last_parts)}"
        (exact if is_exact else matrices).append(Layer(name, tuple(members)))
    whole = Layer("all matrices", tuple(p for each in matrices for p in each.parameters))
    found = candidates(whole, matrices)
    # Of two that hold as much, the mode itself, which has a shorter name.
    found.sort(
        key=lambda each: (
            held[each.name] if held else each.recipe.bytes_per_parameter,
            len(each.options),
        )
    )
    chosen = next((each for each in found if not each.loses), found[-1])
    matrices.sort(key=lambda each: each.distance("bf16_stochastic"))
    return Verdict(chosen, found, matrices + exact, everything)
