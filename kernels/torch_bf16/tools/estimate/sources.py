"""Find the shapes of what a user names: a config, a factory, a checkpoint or a number."""

from __future__ import annotations

import gc
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from torch_bf16.checkpoints.reader import open_checkpoint
from torch_bf16.errors import CheckpointError, described, with_article
from torch_bf16.tools.arguments import quantity
from torch_bf16.tools.factory import import_name, is_factory

from .shapes import ModelShapes, Weight, conversion_notes, narrowed, shapes_of

__all__ = ["KINDS", "model_shapes"]

KINDS = (
    "config.json of transformers or a folder with one, module:factory, a checkpoint, or a number "
    "of parameters such as 8B or 350M"
)

_MOST_PARAMETERS = 10**15
_COLUMNS = 64
_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")
# Weights that were saved in fp16 are mostly loaded in fp32, as a config.json is built.
_TRAINED = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def model_shapes(text: str) -> ModelShapes:
    """The shapes of the model that an argument names.

    Args:
        text: one of :data:`KINDS`.

    Raises:
        ValueError, OSError, CheckpointError, ImportError: it names no model; the message says why.
    """
    path = Path(text)
    if path.exists():
        return _of_path(path)
    if (number := quantity(text)) is not None:
        return _of_number(text, round(number))
    if is_factory(text):
        return _of_factory(text)
    hint = f"{text!r} is not a file or folder here"
    if re.fullmatch(r"[\w.-]+/[\w.-]+", text):
        hint += "; for a model on a hub, download its config.json first"
    elif re.fullmatch(r"\d[\d,.]*[KMBT]?", text, re.IGNORECASE):
        hint += " and not a number, in which commas stand between groups of three digits"
    raise ValueError(f"{hint}. MODEL is a {KINDS}")


def _of_number(text: str, count: int) -> ModelShapes:
    if not 0 < count <= _MOST_PARAMETERS:
        raise ValueError(
            f"{text!r} is {count:,} parameters and must be between 1 and {_MOST_PARAMETERS:,}"
        )
    weights = [Weight("layers.0.weight", (count // _COLUMNS, _COLUMNS))]
    if rest := count % _COLUMNS:
        weights.append(Weight("layers.0.rest", (1, rest)))
    note = (
        "a number has no shapes: all weights are counted as matrices whose rows are whole blocks, "
        "and memory of one tensor or one layer at a time is left out: the largest of released "
        "gradients, and what FSDP gathers. A config.json, a factory or a checkpoint says more"
    )
    return ModelShapes(f"{count:,} parameters", weights, known=False, notes=[note])


def _of_path(path: Path) -> ModelShapes:
    config = path / "config.json" if path.is_dir() else path
    if not config.exists() or not re.search(r"(?<!\.index)\.json$", config.name):
        return _of_checkpoint(path)
    try:
        return _of_config(config)
    except (ValueError, ImportError) as error:
        if config.name != "config.json":
            raise
        try:
            shapes = _of_checkpoint(config.parent)
        except CheckpointError:
            raise error from None
        shapes.notes.insert(0, f"shapes are those of the weights beside it: {error}")
        return shapes


def _of_config(path: Path) -> ModelShapes:
    try:
        content = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    if not isinstance(content, dict) or "model_type" not in content:
        raise ValueError(
            f"{path} is not a config of transformers: it has no 'model_type'. MODEL is a {KINDS}"
        )
    if own := content.get("auto_map"):
        such = f" ({min(own)} and so on)" if isinstance(own, dict) else ""
        raise ValueError(
            f"{path} names code of its own under 'auto_map'{such}, which is not run. Import the "
            "class in a file of yours and give module:factory"
        )
    shapes = shapes_of(_build(path, content), str(path))
    if quantized := content.get("quantization_config"):
        method = quantized.get("quant_method") if isinstance(quantized, dict) else None
        shapes.notes.append(
            f"the config's quantization_config ({method or 'of no named method'}) is not applied: "
            "all weights are counted as trained ones. For quantized weights beside adapters give "
            "module:factory"
        )
    return shapes


@contextmanager
def _without_collection() -> Iterator[None]:
    """Imports and new models leave no garbage; collecting it would take a fifth of their time."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


@_without_collection()
def _build(path: Path, content: dict[str, Any]) -> nn.Module:
    try:
        import transformers
    except ImportError:
        raise ImportError(
            f"{path} is a config of transformers, which is not installed here: pip install "
            "transformers, or give a checkpoint, a number such as 8B, or module:factory"
        ) from None
    try:
        config = transformers.AutoConfig.from_pretrained(path, local_files_only=True)
        name = next(iter(content.get("architectures") or []), None)
        cls = getattr(transformers, name, None) if isinstance(name, str) else None
        if not (isinstance(cls, type) and issubclass(cls, transformers.PreTrainedModel)):
            cls = _head_of(transformers, config)
        with torch.device("meta"):
            return cls._from_config(config, dtype=torch.float32)
    except ImportError:
        raise
    # A config with wrong numbers may raise almost anything.
    except Exception as error:
        raise ValueError(
            f"transformers {transformers.__version__} builds no model from {path}: "
            f"{described(error)}"
        ) from error


def _head_of(transformers: Any, config: Any) -> Any:
    """A class for a config that names none: with the output layer, if there is such a class."""
    # Whole models first: of some, the decoder alone is a causal language model.
    for kind in ("ForImageTextToText", "ForSeq2SeqLM", "ForSpeechSeq2Seq", "ForCausalLM", ""):
        found = getattr(transformers, f"AutoModel{kind}")._model_mapping.get(type(config), None)
        found = found[0] if isinstance(found, tuple) else found
        if found is not None and found.config_class is type(config):
            return found
    raise ValueError(f"transformers has no model for {type(config).__name__}")


def _of_factory(text: str) -> ModelShapes:
    model = import_name(text)
    if not isinstance(model, nn.Module):
        if not callable(model):
            raise ValueError(f"{text!r} is {with_article(model)}, and no module or factory of one")
        try:
            with torch.device("meta"):
                model = model()
        # A user's code may raise anything, and a script's main function may end the process.
        except (Exception, SystemExit) as error:
            raise ValueError(
                f"{text}() failed on the meta device, which has shapes and no numbers: "
                f"{described(error)}. It is called without arguments, and must make "
                "a model without reading weights or numbers of its tensors"
            ) from error
    # Factories for recommend and compare return the model first.
    if isinstance(model, (tuple, list)) and model:
        model = model[0]
    if not isinstance(model, nn.Module):
        raise ValueError(f"{text}() returned {with_article(model)}, not a torch.nn.Module")
    return shapes_of(model, text)


def _of_checkpoint(path: Path) -> ModelShapes:
    saved = open_checkpoint(path)
    owners = {name.rpartition(".")[0] for name in saved.tensors if name.endswith(_STATISTICS)}
    weights, buffers, small, dtypes, kept_dtypes = [], 0, 0, set(), set()
    for name, each in saved.untied().items():
        owner, _, last = name.rpartition(".")
        if each.dtype in _TRAINED and last not in _STATISTICS:
            kept = torch.float32 if each.is_complex else None
            dtypes.add(each.dtype.to_complex() if each.is_complex else each.dtype)
            weights.append(Weight(name, each.shape, stays_fp32=owner in owners, frozen_as=kept))
        else:
            buffers += each.numel * each.dtype.itemsize
            small += narrowed(each.numel, each.dtype)
            kept_dtypes.add(each.dtype)
    if not weights:
        raise ValueError(f"{path} holds no floating-point weights that could be trained")
    notes = [*saved.notes, *conversion_notes(dtypes - {torch.float16})]
    notes.append("all floating-point tensors of a checkpoint are counted as parameters")
    # Statistics are in a dtype that weights may have, too.
    if others := {each for each in kept_dtypes if each.is_floating_point} - {*_TRAINED}:
        names = " and ".join(sorted(str(each).removeprefix("torch.") for each in others))
        notes[-1] += f", except those in {names}, which are counted as they were saved"
    return ModelShapes(str(path), weights, buffers, buffers, small, small, notes=notes)
