"""What to write to train with a recipe, for each host and launcher."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from .verdict import Candidate

__all__ = ["launch_line", "lines", "literal", "without_variable"]

_PLUGINS = {
    "lightning": ("lightning_bf16", "Trainer"),
    "pytorch_lightning": ("lightning_bf16.pytorch_lightning", "Trainer"),
    "fabric": ("lightning_bf16.fabric", "Fabric"),
    "lightning_fabric": ("lightning_bf16.lightning_fabric", "Fabric"),
}


def lines(host: str, candidate: Candidate, command: str) -> list[str]:
    """The lines to write to train with a recipe.

    Args:
        host: a name of :class:`.host.Host`.
        candidate: the recipe.
        command: the command that starts the training.
    """
    mode, options = candidate.mode, candidate.options
    named = "".join(f", {name}={literal(value)}" for name, value in options.items())
    if host in _PLUGINS:
        package, kind = _PLUGINS[host]
        if not options:
            return [f"import {package.partition('.')[0]}", f'{kind}(precision="{mode}")']
        plugin = f'BF16Precision("{mode}"{named})'
        return [f"from {package} import BF16Precision", f"{kind}(plugins=[{plugin}])"]
    if host == "trainer":
        return [" ".join([f"export BF16_MODE={mode}", *_variables(options)]), command]
    if host == "accelerate":
        if not options:
            return ["import accelerate_bf16", f'Accelerator(mixed_precision="{mode}")']
        handler = f"BF16RecipeKwargs({named.removeprefix(', ')})"
        return [
            "from accelerate_bf16 import BF16RecipeKwargs",
            f'Accelerator(mixed_precision="{mode}", kwargs_handlers=[{handler}])',
        ]
    recipe = f'torch_bf16.get_recipe("{mode}"{named})' if options else f'"{mode}"'
    return [
        "import torch_bf16",
        f"model, optimizer = torch_bf16.prepare(model, optimizer, {recipe})",
    ]


def launch_line(host: str, candidate: Candidate, command: str) -> str | None:
    """The shell command that trains a script unchanged; None if no launcher can name the recipe.

    Args:
        host: a name of :class:`.host.Host`.
        candidate: the recipe.
        command: the command that starts the training: ``python`` and its arguments.
    """
    if without_variable(candidate.options.get("keep_fp32", ())):
        return None
    if host in _PLUGINS:
        return " ".join([f"BF16_MODE={candidate.mode}", *_variables(candidate.options), command])
    if host not in ("trainer", "accelerate"):
        return None
    launched = " ".join(
        [*_variables(candidate.options), f"accelerate launch --mixed_precision {candidate.mode}"]
    )
    return f"{launched} {command.removeprefix('python ')}"


def without_variable(keep_fp32: Sequence[str | type]) -> list[str | type]:
    """What to keep in fp32 that no variable can say: classes, and patterns with commas."""
    return [key for key in keep_fp32 if isinstance(key, type) or "," in key]


def _variables(options: Mapping[str, Any]) -> list[str]:
    """Assignments for a shell."""
    words = {name: _word(value) for name, value in options.items()}
    return [f"BF16_{name.upper()}={shlex.quote(word)}" for name, word in words.items() if word]


def _word(value: str | Sequence[str | type]) -> str:
    if isinstance(value, str):
        return value
    unsaid = without_variable(value)
    return ",".join(str(key) for key in value if key not in unsaid)


def literal(value: Any) -> str:
    """An option's value as one writes it in Python."""
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(literal, value))}]"
    return value.__name__ if isinstance(value, type) else json.dumps(value)
