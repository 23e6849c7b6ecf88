"""The bits of trials, as computed by the NumPy oracle of the tests and shipped as digests."""

from __future__ import annotations

import functools
from importlib.resources import files
from pathlib import Path

from torch_bf16.backends.bucket import Variant

__all__ = ["FILE", "expected"]

FILE = Path(__file__).with_name("digests.txt")
"""Where a checkout keeps them; a package that is imported may be in a zip file."""


def expected(variant: Variant) -> list[str] | None:
    """The digest of each plane after the variant's trial; None if the file has none."""
    return _shipped().get(variant.name)


@functools.cache
def _shipped() -> dict[str, list[str]]:
    text = files("torch_bf16.backends.certificates").joinpath(FILE.name).read_text()
    lines = (line.split() for line in text.splitlines())
    return {name: digests for name, *digests in lines}
