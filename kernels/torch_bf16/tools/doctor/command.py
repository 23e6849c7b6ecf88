"""``python -m torch_bf16 doctor``: its options, and what it does with them."""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path

from torch_bf16.checkpoints.reader import open_checkpoint
from torch_bf16.tools.arguments import add_json_argument, count, keep_inputs, positive_number
from torch_bf16.tools.output import progress_line, publish

from .examination import examine
from .report import record, show
from .verdict import judge

__all__ = ["add_doctor_arguments", "doctor"]

_STATUS = {True: 0, False: 1, None: 3}


def add_doctor_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument(
        "checkpoints",
        nargs="+",
        type=Path,
        metavar="CHECKPOINT",
        help="an earlier and a later one, or one with the optimizer's state: a file of "
        "safetensors, torch.save or Lightning, an index, or a folder of the Trainer, Accelerate "
        "or DCP",
    )
    parser.add_argument(
        "--lr", type=positive_number, help="a learning rate in place of the checkpoint's"
    )
    parser.add_argument(
        "--most", type=count, default=20, metavar="N", help="weights to list (default: %(default)s)"
    )
    add_json_argument(parser)


def doctor(options: argparse.Namespace) -> int:
    """Say whether a run has been learning.

    Returns:
        The exit status: 0 if it has, 1 if weights stall or are broken, 3 if the checkpoints cannot
        tell.

    Raises:
        ValueError, OSError, CheckpointError: a checkpoint cannot be used; the message says why.
    """
    if len(options.checkpoints) > 2:
        raise ValueError(f"doctor takes one checkpoint or two, not {len(options.checkpoints)}")
    keep_inputs(options.json, *options.checkpoints)
    *earlier, after = [open_checkpoint(path) for path in options.checkpoints]
    before = earlier[0] if earlier else None
    with progress_line() as progress:
        found = examine(before, after, options.lr, progress)
    verdict = judge(found)
    paths = {"before": str(before.path)} if before else {}
    content = record(found, verdict, {**paths, "after": str(after.path)})
    publish(content, options.json, partial(show, most=options.most))
    return _STATUS[verdict.healthy]
