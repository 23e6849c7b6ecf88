"""torchvision beside a build of torch for CPUs, and data sets of digits that are not fetched."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch.library import Library

__all__ = ["stub_images"]

_kept: list[Library] = []


class Digits(torch.utils.data.Dataset):
    """As many as MNIST has: bright squares on dark ground, whose places are their labels."""

    def __init__(self, root: Any, train: bool = True, transform: Any = None, **_: Any) -> None:
        self._transform, self._length = transform, 60_000 if train else 10_000
        self.targets = torch.arange(self._length) % 10

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> tuple[Any, int]:
        from PIL import Image

        image = torch.rand(28, 28, generator=torch.Generator().manual_seed(index)) * 0.2
        place = index % 10
        image[5 * (place // 5) + 5 :][:5, 5 * (place % 5) :][:, :5] = 1
        picture: Any = Image.fromarray((image * 255).byte().numpy())
        return self._transform(picture) if self._transform else picture, place


def stub_images() -> None:
    """Make torchvision importable, where it is, and let ``datasets.MNIST`` be made-up digits."""
    try:
        from torchvision import datasets
    except ImportError:
        return
    except RuntimeError:
        # Its operators are compiled for CUDA; it describes two to torch that are then missing. No
        # script here uses them.
        for name in [each for each in sys.modules if each.startswith("torchvision")]:
            del sys.modules[name]
        _kept.append(Library("torchvision", "DEF"))
        for name in ("nms", "qnms"):
            _kept[-1].define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        from torchvision import datasets
    datasets.MNIST = Digits
