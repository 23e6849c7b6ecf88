"""Where the record of a study goes: looked at before its first run, so that no run is lost."""

from __future__ import annotations

import sys
from pathlib import Path


def make_room_for(file: Path | None) -> None:
    """Make the folder of a file that will be written; None for no file.

    Raises:
        SystemExit: it cannot be made, or the file's name is that of a folder.
    """
    if file is None:
        return
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        sys.exit(f"the folder {file.parent} cannot be made: {error.strerror}")
    if file.is_dir():
        sys.exit(f"{file} is a folder: give the name of a file")
