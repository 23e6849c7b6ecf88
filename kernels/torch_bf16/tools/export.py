"""``python -m torch_bf16 export``: the exact fp32 weights of a checkpoint, in a file."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from torch_bf16.checkpoints.export import export_file, export_weights
from torch_bf16.errors import CheckpointError
from torch_bf16.states.schema import HEADER

from .arguments import file_to_write, keep_inputs
from .output import say
from .weights import SavedTensor, open_checkpoint

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
    source, arguments = options.checkpoint, (options.output, options.dtype, options.optimizer)
    if options.output.exists() and not options.output.is_file():
        raise ValueError(
            f"{options.output} is a device or a pipe, which the file would replace: give the name "
            "of a file to write"
        )
    keep_inputs(options.output, source, options.optimizer)
    if source.is_dir() or source.name.endswith(".index.json"):
        print(export_weights(*_state_dicts(source, options.optimizer is None), *arguments))
    else:
        print(export_file(source, *arguments))
    return 0


def _state_dicts(path: Path, with_optimizer: bool) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """The state dicts of the model and of the optimizer in a folder."""
    further = sorted(each.name for each in path.glob("optimizer_[1-9]*"))
    if further and with_optimizer:
        raise CheckpointError(
            f"{path} holds {len(further) + 1} optimizers, and does not say which weights belong to "
            "which. Export one model at a time: its file of weights, with its --optimizer FILE"
        )
    saved = open_checkpoint(path)
    for note in saved.notes:
        say(f"note: {note}")
    # A tied tensor stays one tensor, so that each of its names gets the master.
    read = {each.tied or name: _whole(each) for name, each in saved.tensors.items()}
    weights = {name: read[each.tied or name] for name, each in saved.tensors.items()}
    if saved.optimizer is None:
        return weights, None
    states = {
        key: {name: _whole(each) for name, each in state.items()}
        for key, state in saved.optimizer.state.items()
    }
    groups, header = saved.optimizer.groups, saved.optimizer.header
    return weights, {
        "state": states,
        "param_groups": groups,
        **({HEADER: header} if header else {}),
    }


def _whole(value: Any) -> Any:
    return value.whole() if isinstance(value, SavedTensor) else value
