"""What this package replaces in Lightning; README.md has a table of it."""

from .connectors import on_import
from .replacements import replacements

__all__ = ["on_import", "replacements"]
