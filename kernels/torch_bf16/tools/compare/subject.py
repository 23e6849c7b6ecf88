"""The model that is trained: the user's, from a factory, or the built-in one, on a text."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torch_bf16.tools.factory import Training, import_name, training_of

from .corpus import Windows, load_corpus
from .next_byte import CONTEXT, NextByte

__all__ = ["Subject", "subject_of"]

_BATCH = 256
_LEAST = 10_000
_NAME = "a model of 0.35 million parameters of the next byte"


@dataclass(frozen=True)
class Subject:
    """A model to train again and again.

    Attributes:
        name: for people.
        source: what identifies it: the factory's name and a hash of its file, or a hash of the
            text.
        text: bytes that the built-in model is trained on, uint8; None for a factory.
        factory: as the user wrote it; empty for the built-in model.
    """

    name: str
    source: str
    text: Tensor | None = None
    factory: str = ""

    def make(self, steps: int) -> Training:
        """A new model and its batches, which follow from the state of the random generators.

        Raises:
            ImportError, ValueError: the factory cannot be used; the message says why.
        """
        if self.text is not None:
            return _built_in(self.text, steps)
        training = training_of(self.factory)
        trained = [p for p in training.model.parameters() if p.requires_grad]
        if wrong := {p.dtype for p in trained} - {torch.float32}:
            raise ValueError(
                f"{self.factory}() returned a model with weights in {', '.join(map(str, wrong))}; "
                "return it in fp32: compare casts it for each precision"
            )
        return training


def _built_in(text: Tensor, steps: int) -> Training:
    model = NextByte()
    seed = int(torch.randint(2**31, ()))
    drawn = Windows(text, n=steps, batch_size=_BATCH, context=CONTEXT, seed=seed)
    return Training(model, drawn, None, _NAME)


def subject_of(factory: str | None, text: Path | None = None) -> Subject:
    """The subject of a comparison.

    Args:
        factory: ``module:factory``; None for the built-in model.
        text: a file for the built-in model; None for the sources of Python's standard library.

    Raises:
        ImportError, ValueError, OSError: the factory or the file cannot be used.
    """
    if factory is not None:
        return Subject(factory, f"{factory} {_source_hash(factory)}", factory=factory)
    if text is None:
        content, what = load_corpus().train, "Python's standard library"
    else:
        raw = text.read_bytes()
        content, what = torch.frombuffer(bytearray(raw or b"\0"), dtype=torch.uint8), text.name
        if len(raw) < _LEAST:
            raise ValueError(f"{text} has {len(raw)} bytes, and must have {_LEAST:,} to train on")
    digest = hashlib.sha256(content.numpy().tobytes()).hexdigest()[:12]
    return Subject(f"{_NAME} in {what}", f"built in, text {digest}", text=content)


def _source_hash(factory: str) -> str:
    """A hash of the file that defines a factory: no run resumes after its model has changed."""
    found: Any = import_name(factory)
    code = getattr(found, "__code__", None)
    try:
        content = Path(code.co_filename).read_bytes() if code else repr(found).encode()
    except OSError:
        content = b""
    return hashlib.sha256(content).hexdigest()[:12]
