"""Where the record of a study goes: looked at before its first run, so that no run is lost."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from torch_bf16.tools.arguments import file_to_write


def make_room_for(file: Path | None) -> None:
    """Make the folder of a file that will be written; None for no file.

    Raises:
        SystemExit: it cannot be made, or the file cannot be written there.
    """
    if file is None:
        return
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        sys.exit(f"the folder {file.parent} cannot be made: {error.strerror}")
    try:
        file_to_write(str(file))
    except argparse.ArgumentTypeError as error:
        sys.exit(str(error))
