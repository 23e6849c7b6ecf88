"""Pieces of tensors are read without the rest, however a tensor lies in memory and in files."""

from __future__ import annotations

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.utils._python_dispatch import TorchDispatchMode

from torch_bf16.checkpoints.reader import dcp_parts, open_checkpoint
from torch_bf16.checkpoints.reader.saved import boxes

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # DCP without a process group

SHAPES = [(7,), (3, 4), (2, 1, 5), (1, 12), (3, 2, 2, 3)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_boxes_fill_every_range_in_order_and_nothing_else(shape):
    whole = torch.arange(torch.Size(shape).numel()).view(shape)
    for start in range(whole.numel() + 1):
        for stop in range(start, whole.numel() + 1):
            found = [whole[at][a:b].flatten() for at, a, b in boxes(shape, start, stop)]
            assert torch.equal(torch.cat([whole.new_empty(0), *found]), whole.flatten()[start:stop])
            assert len(found) < 2 * len(shape)


WEIGHTS = {
    "channels_last": torch.randn(40, 8, 4, 4).to(memory_format=torch.channels_last),
    "transposed": torch.randn(50, 60).t(),
    "stacked": torch.randn(2, 60, 70),
    "stacked_transposed": torch.randn(2, 60, 70).transpose(1, 2),
    "permuted": torch.randn(6, 7, 8, dtype=torch.bfloat16).permute(2, 0, 1),
}


class Copied(TorchDispatchMode):
    """Counts the elements that are copied."""

    def __init__(self):
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        if func in (torch.ops.aten.clone.default, torch.ops.aten.copy_.default):
            self.numel += found.numel()
        return found


@pytest.mark.parametrize("kind", ["file", "dcp"])
@pytest.mark.parametrize("name", WEIGHTS)
def test_all_pieces_together_copy_a_tensor_once(name, kind, tmp_path, monkeypatch):
    weight, path = WEIGHTS[name], tmp_path / "run"
    if kind == "dcp":
        dcp.save({"model": {name: weight}}, checkpoint_id=path)
    else:
        torch.save({name: weight}, path)
    (saved,) = open_checkpoint(path).tensors.values()
    numbers, read = dcp_parts._numbers, []

    def counted(*arguments):
        found = numbers(*arguments)
        read.append(found.numel())
        return found

    monkeypatch.setattr(dcp_parts, "_numbers", counted)
    with Copied() as copied:
        pieces = [saved.read(at, min(at + 99, saved.numel)) for at in range(0, saved.numel, 99)]
    assert torch.equal(torch.cat(pieces).view(saved.shape), weight)
    assert sum(read) == (saved.numel if kind == "dcp" else 0)
    assert copied.numel <= saved.numel
    assert not saved.read(3, 3).numel()
