"""Which hosts are installed, whether their hooks are in place, and which versions were tested."""

from __future__ import annotations

import importlib.metadata
import os
import re
import sys
from dataclasses import dataclass
from typing import Any

from torch_bf16.environment import OFF
from torch_bf16.errors import version_numbers
from torch_bf16.tools.machine import versions

__all__ = ["TESTED", "Hook", "hook", "host_rows", "is_older", "needed"]

TESTED = {
    "torch": "2.15.0",
    "numpy": "2.5.2",
    "numba": "0.68.1",
    "triton": "3.9.0",
    "lightning": "2.6.6",
    "pytorch-lightning": "2.6.6",
    "lightning-fabric": "2.6.6",
    "accelerate": "1.15.0",
    "transformers": "5.24.0",
    "trl": "1.16.0",
    "peft": "0.21.2",
}
"""The newest version of each that the tests have run with; ``docs/versions.md`` says when."""

_IMPORT = "import lightning_bf16 or accelerate_bf16 in the script"

HOSTS = (
    "lightning",
    "pytorch-lightning",
    "lightning-fabric",
    "accelerate",
    "transformers",
    "trl",
    "peft",
)


@dataclass(frozen=True)
class Hook:
    """Whether hosts know the modes without an import of this package.

    Attributes:
        works: whether they do.
        why: why, or why not.
        instead: what makes it work; empty if it does.
    """

    works: bool
    why: str
    instead: str = ""


def hook() -> Hook:
    """Find out whether hosts know the modes without an import of this package."""
    switch = os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD", "1")
    # As torch reads it: no other value means yes.
    if switch != "1":
        why = f"TORCH_DEVICE_BACKEND_AUTOLOAD={switch}: torch loads no extension"
        return Hook(False, why, f"unset it, or {_IMPORT}")
    if os.environ.get("BF16_AUTOLOAD", "1").strip().lower() in OFF:
        why = f"BF16_AUTOLOAD={os.environ['BF16_AUTOLOAD']} turns it off"
        return Hook(False, why, f"unset it, or {_IMPORT}")
    points = importlib.metadata.entry_points(group="torch.backends")
    if not any(each.name == "bf16" for each in points):
        why = "the package is on the path but not installed, so torch does not find it"
        return Hook(False, why, f"pip install the folder of its pyproject.toml, or {_IMPORT}")
    # Its finder, and not the module, which other code imports, too.
    if not any(type(each).__module__ == "bf16_autoload" for each in sys.meta_path):
        return Hook(False, "installed, but torch has not called it, or the call failed", _IMPORT)
    return Hook(True, "installed, and called by torch")


def host_rows() -> list[dict[str, Any]]:
    """A row for each host: its version, and the oldest and newest one tested."""
    found = versions(HOSTS)
    return [
        {
            "name": name,
            "version": found[name],
            # One extra stands for the three names under which Lightning is installed.
            "oldest": needed("lightning" if "lightning" in name else name),
            "newest_tested": TESTED[name],
        }
        for name in HOSTS
    ]


def needed(name: str) -> str | None:
    """The oldest version that this package requires; None if it sets no bound."""
    try:
        wanted = importlib.metadata.requires("torch-bf16") or []
    except importlib.metadata.PackageNotFoundError:
        return None
    pattern = re.compile(rf"{re.escape(name)}(?:\[.*?\])?\s*>=\s*([\d.]+)")
    # The dev extra requires newer versions than users need.
    wanted = [each for each in wanted if not re.search(r"extra == .dev", each)]
    return next((found[1] for each in wanted if (found := pattern.match(each))), None)


def is_older(version: str, than: str) -> bool:
    """Whether a version is older than another, by their first two numbers."""
    return version_numbers(version) < version_numbers(than)
