"""Pictures that are made up, and torchvision beside a build of torch for CPUs."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch.library import Library

__all__ = ["save_captioned", "save_classes", "save_images", "stub_images"]

_kept: list[Library] = []


class Digits(torch.utils.data.Dataset):
    """As many as MNIST has: bright squares on dark ground, whose places are their labels."""

    def __init__(self, root: Any, train: bool = True, transform: Any = None, **_: Any) -> None:
        self._transform, self._length = transform, 60_000 if train else 10_000
        self.targets = torch.arange(self._length) % 10

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> tuple[Any, int]:
        image = torch.rand(28, 28, generator=torch.Generator().manual_seed(int(index))) * 0.2
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


def save_images(folder: Path) -> None:
    """Sixteen pictures."""
    for n in range(16):
        Image.new("RGB", (32, 32), (16 * n, 255 - 16 * n, 128)).save(folder / f"{n}.png")


def save_captioned(folder: Path) -> None:
    """The same with captions and other pictures, as an image folder of ``datasets``."""
    save_images(folder)
    names = [f"{n}.png" for n in range(16)]
    rows = [
        {"file_name": one, "other_image_file_name": other, "text": f"a picture of colour {n}"}
        for n, (one, other) in enumerate(zip(names, reversed(names), strict=True))
    ]
    (folder / "metadata.jsonl").write_text("\n".join(map(json.dumps, rows)))


def save_classes(folder: Path) -> None:
    """Pictures of two classes, one darker than the other, to train and to validate."""
    for part in ("train", "validation"):
        for label, shade in (("dark", 0), ("light", 128)):
            (folder / part / label).mkdir(parents=True)
            for n in range(32):
                picture = Image.new("RGB", (32, 32), (shade + 4 * n,) * 3)
                picture.save(folder / part / label / f"{n}.png")
