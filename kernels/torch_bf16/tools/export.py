"""``python -m torch_bf16 export``: the exact fp32 weights of a checkpoint, in a file."""

from __future__ import annotations

import argparse
from pathlib import Path

from torch_bf16.checkpoints.export import export_weights
from torch_bf16.checkpoints.reader import open_checkpoint

from .arguments import file_to_write, keep_inputs
from .output import say

__all__ = ["add_export_arguments", "export"]


def add_export_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument(
        "checkpoint",
        type=Path,
        help="a file of save_checkpoint, torch, Lightning or safetensors, an index of several, or "
        "a folder of Accelerate, the Trainer, Lightning or DCP",
    )
    parser.add_argument(
        "output", type=file_to_write, help="*.safetensors, else a file of torch.save"
    )
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16"),
        default="float32",
        help="bfloat16 leaves weights as they were trained (default: float32)",
    )
    parser.add_argument(
        "--optimizer",
        type=Path,
        metavar="FILE",
        help="the optimizer's state dict, if it is in another file",
    )


def export(options: argparse.Namespace) -> int:
    """Write the exact weights of a checkpoint.

    Raises:
        CheckpointError, OSError, ValueError: the weights cannot be read, or the output would
            overwrite the checkpoint; nothing was written.
    """
    keep_inputs(options.output, options.checkpoint, options.optimizer)
    saved = open_checkpoint(options.checkpoint, verify=True)
    for note in saved.notes:
        say(f"note: {note}")
    print(export_weights(saved, options.output, options.dtype, options.optimizer))
    return 0
