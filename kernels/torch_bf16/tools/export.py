"""``python -m torch_bf16 export``: the exact fp32 weights of a checkpoint, in a file."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from torch_bf16.checkpoints.export import export_file
from torch_bf16.errors import CheckpointError

from .output import file_to_write

__all__ = ["add_export_arguments", "export"]


def add_export_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("checkpoint", type=Path, help="of save_checkpoint, torch or Lightning")
    parser.add_argument(
        "output", type=file_to_write, help="*.safetensors, else a file of torch.save"
    )
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument(
        "--optimizer", type=Path, metavar="FILE", help="its state dict, where it is in another file"
    )


def export(options: argparse.Namespace) -> int:
    """Write them; the exit status is 1 where there are none, and nothing was written."""
    try:
        print(export_file(options.checkpoint, options.output, options.dtype, options.optimizer))
    except (CheckpointError, OSError) as error:
        print(f"python -m torch_bf16 export: {error}", file=sys.stderr)
        return 1
    return 0
