"""The versions that the tests install."""

import re
from pathlib import Path

_FILE = Path(__file__).parents[1] / "constraints.txt"


def pinned(package: str) -> str:
    """The version of a package in ``constraints.txt``."""
    (found,) = re.findall(rf"^{package}==([^ ;\n]+)", _FILE.read_text(), re.MULTILINE)
    return found
