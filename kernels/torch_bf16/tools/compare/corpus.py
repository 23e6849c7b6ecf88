"""Real text that every machine has: the bytes of the Python standard library's own sources."""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

__all__ = ["Corpus", "Windows", "batches", "load_corpus"]

_SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
_VALIDATION_SHARE = 10  # one file in ten
_LONGEST_FILE = 64_000  # bytes taken of one file, so that no single one dominates


@dataclass(frozen=True)
class Corpus:
    """Two byte strings as uint8 tensors; no file is in both."""

    train: torch.Tensor
    validation: torch.Tensor

    @classmethod
    def of(cls, train: Sequence[bytes], validation: Sequence[bytes]) -> Corpus:
        """Join texts by newlines."""
        joined = (bytearray(b"\n".join(texts)) for texts in (train, validation))
        return cls(*(torch.frombuffer(each, dtype=torch.uint8) for each in joined))


def load_corpus(n_bytes: int = 4_000_000) -> Corpus:
    """Read about ``n_bytes`` of source text, the same bytes each time on one Python version.

    Files are taken in the order of a hash of their names, so that a small corpus is still a fair
    sample of the library, and every tenth file goes to the validation part.
    """
    root = Path(sysconfig.get_path("stdlib"))
    parts: dict[str, list[bytes]] = {"train": [], "validation": []}
    total = 0
    for position, path in enumerate(_source_files(root)):
        if total >= n_bytes:
            break
        text = path.read_bytes()[:_LONGEST_FILE]
        total += len(text)
        parts["validation" if position % _VALIDATION_SHARE == 0 else "train"].append(text)
    if not parts["train"] or not parts["validation"]:
        raise FileNotFoundError(
            f"{root} holds too few .py files for a corpus of {n_bytes} bytes. If this Python comes "
            "without the sources of its standard library, use one from python.org or conda"
        )
    return Corpus.of(**parts)


class Windows:
    """The batches of :func:`batches`, each read from the text when it is used."""

    def __init__(
        self, text: torch.Tensor, *, n: int, batch_size: int, context: int, seed: int
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        ends = len(text) - context - 1
        if ends < 1:
            raise ValueError(
                f"the text has {len(text)} tokens, and a context of {context} needs "
                f"{context + 2}: take more text, or less context"
            )
        self.starts = torch.randint(ends, (n, batch_size, 1), generator=generator)
        self._text, self._offsets = text, torch.arange(context + 1)

    def at(self, starts: torch.Tensor) -> torch.Tensor:
        """The windows that begin at ``starts``, shape (..., 1)."""
        return self._text[starts + self._offsets].long()

    def __iter__(self) -> Iterator[torch.Tensor]:
        return map(self.at, self.starts)


def batches(
    text: torch.Tensor, *, n: int, batch_size: int, context: int, seed: int
) -> torch.Tensor:
    """Draw ``n`` batches of windows: int64, shape (n, batch_size, context + 1)."""
    drawn = Windows(text, n=n, batch_size=batch_size, context=context, seed=seed)
    return drawn.at(drawn.starts)


def _source_files(root: Path) -> list[Path]:
    files = []
    for folder, folders, names in os.walk(root):
        # What is installed lies here, too, and is more than the library.
        folders[:] = [each for each in folders if each not in _SKIPPED_FOLDERS]
        files += [os.path.join(folder, name) for name in names if name.endswith(".py")]

    def place(file: str) -> bytes:
        return hashlib.sha256(Path(file).relative_to(root).as_posix().encode()).digest()

    return [Path(file) for file in sorted(files, key=place)]
