"""The README as a package index shows it, where links into the repository lead nowhere.

A build hook of hatchling. With `Repository` in `project.urls`, on GitHub, links and pictures become
absolute; without it links become plain text and pictures are left out.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface


class ReadmeHook(MetadataHookInterface):
    """Makes the field `readme` of the built metadata."""

    def update(self, metadata: dict[str, Any]) -> None:
        text = (Path(self.root) / "README.md").read_text()
        repository = metadata.get("urls", {}).get("Repository")
        readme = with_absolute_links(text, repository)
        metadata["readme"] = {"content-type": "text/markdown", "text": readme}


def with_absolute_links(readme: str, repository: str | None) -> str:
    """A README in which no link and no picture is relative.

    Args:
        readme: Markdown, with pictures in HTML.
        repository: of GitHub, `https://github.com/...`; None where there is no public one.

    Example:
        >>> with_absolute_links("[docs](docs/index.md)", "https://github.com/a/b")
        '[docs](https://github.com/a/b/blob/main/docs/index.md)'
        >>> with_absolute_links("[docs](docs/index.md)", None)
        'docs'
    """
    link = re.compile(r"(?<!!)\[((?:[^\[\]]|\n)+)\]\((?!https?://|#)([^)\s]+)\)")
    if repository is None:
        readme = re.sub(r"<picture>.*?</picture>\n+", "", readme, flags=re.S)
        return link.sub(r"\1", readme)
    readme = link.sub(rf"[\1]({repository}/blob/main/\2)", readme)
    return re.sub(r'(src|srcset)="(?!https?://)([^"]+)"', rf'\1="{repository}/raw/main/\2"', readme)
