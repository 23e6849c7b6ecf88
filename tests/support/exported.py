"""Exports of checkpoints, as ``python -m torch_bf16 export`` makes them."""

from pathlib import Path

from torch_bf16.checkpoints.export import export_weights
from torch_bf16.checkpoints.reader import open_checkpoint


def export_file(source, target, dtype="float32", optimizer=None):
    """Write the weights of a checkpoint, whose checksums are compared; returns what is said."""
    return export_weights(open_checkpoint(Path(source), verify=True), target, dtype, optimizer)
