"""The model that is trained: the user's, from a factory, or the built-in one, on a text."""

from __future__ import annotations

import hashlib
import sys
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from torch_bf16.tools.factory import Training, import_name, training_of

from .corpus import Windows, load_corpus
from .next_byte import CONTEXT, NextByte

__all__ = ["Subject", "subject_of"]

_BATCH = 256
_LEAST_BYTES = 10_000
_NAME = "a model of 0.35 million parameters of the next byte"


@dataclass(frozen=True)
class Subject:
    """A model to train again and again.

    Attributes:
        name: for people.
        text: bytes that the built-in model is trained on, uint8; None for a factory.
        factory: as the user wrote it; empty for the built-in model.
        made: the models that the factory returned, and their parameters, by their ids.
    """

    name: str
    text: Tensor | None = None
    factory: str = ""
    made: dict[int, weakref.ref[Any]] = field(default_factory=dict, compare=False, repr=False)

    @property
    def source(self) -> str:
        """What identifies it: the factory's name and a hash of its code, or a hash of the text.

        Hashed are the factory's file and what has been imported from beside it so far.
        """
        if self.text is None:
            return f"{self.factory} {_hash_of_code(self.factory)}"
        return f"built in, text {hashlib.sha256(self.text.numpy().tobytes()).hexdigest()[:12]}"

    def make(self, steps: int) -> Training:
        """A new model and its batches, which follow from the state of the random generators.

        Raises:
            ImportError, ValueError: the factory cannot be used, or returned a model again; the
                message says why.
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
        self._check_new(training.model)
        return training

    def _check_new(self, model: nn.Module) -> None:
        """Refuse weights that an earlier run has trained or cast."""
        parts = [("", model), *model.named_parameters()]
        for name, each in parts:
            before = self.made.get(id(each))
            if before is not None and before() is each:
                what = f"the same {name}" if name else "the same model"
                raise ValueError(
                    f"{self.factory}() returned {what} again, and each run must begin from new "
                    "weights: make the whole model within the function"
                )
        self.made.update((id(each), weakref.ref(each)) for _, each in parts)


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
        import_name(factory)
        return Subject(factory, factory=factory)
    if text is None:
        content, what = load_corpus().train, "Python's standard library"
    else:
        raw = text.read_bytes()
        content, what = torch.frombuffer(bytearray(raw or b"\0"), dtype=torch.uint8), text.name
        if len(raw) < _LEAST_BYTES:
            raise ValueError(
                f"{text} has {len(raw)} bytes, and must have {_LEAST_BYTES:,} to train on"
            )
    return Subject(f"{_NAME} in {what}", text=content)


def _hash_of_code(factory: str) -> str:
    """A hash of what defines a factory: no run resumes after its model has changed."""
    name = factory.rpartition(":")[0]
    own = name if name.endswith(".py") else getattr(sys.modules.get(name), "__file__", None)
    if own is None:
        return "without a file"
    own = Path(own).resolve()
    # The folder in which its imports are found first: of a.b that of a.
    depth = 0 if name.endswith(".py") else name.count(".") + (own.name == "__init__.py")
    folder = own.parents[depth]
    beside = {own} | {path for path in _imported() if path.is_relative_to(folder)}
    digest = hashlib.sha256()
    for path in sorted(beside):
        try:
            content = path.read_bytes()
        except OSError:  # it was removed, or lies in an archive
            content = b""
        digest.update(f"{path.relative_to(folder)} {len(content)}\n".encode() + content)
    return digest.hexdigest()[:12]


def _imported() -> Iterator[Path]:
    """Files of imported modules, without installed ones and this package, which have versions."""
    for name, module in [*sys.modules.items()]:
        path = getattr(module, "__file__", None)
        if path and name.partition(".")[0] != "torch_bf16":
            path = Path(path).resolve()
            if {"site-packages", "dist-packages"}.isdisjoint(path.parts):
                yield path
