"""Inputs and labels for a model of transformers, from the signature of its ``forward``.

Several are tried in turn, as signatures do not say which inputs belong together, or how labels are
shaped. Models of text and something else get the text alone where that is enough for a loss.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from typing import Any

import torch
from tiny_configs import VOCABULARY
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

Batch = dict[str, Any]
ROWS, LENGTH = 2, 16


def batches(model: PreTrainedModel) -> Iterator[Batch]:
    """Batches to try in turn: each kind of inputs with each kind of labels."""
    accepted = set(inspect.signature(model.forward).parameters)
    for inputs in _inputs(model, accepted):
        if inputs and inputs.keys() <= accepted:
            yield from _labelled(model, accepted, inputs)


def _inputs(model: PreTrainedModel, accepted: set[str]) -> Iterator[Batch]:
    config = model.config
    generator = torch.Generator().manual_seed(1)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    def tokens(*shape: int) -> Tensor:
        # Not the first and the last ones, which have meanings of their own.
        return torch.randint(5, max(8, _vocabulary(model) - 40), shape, generator=generator)

    text: Batch = {"input_ids": tokens(ROWS, LENGTH)}
    text["attention_mask"] = torch.ones(ROWS, LENGTH, dtype=torch.long)
    text["bbox"] = torch.randint(0, 50, (ROWS, LENGTH, 4), generator=generator).sort(-1).values
    text = {name: value for name, value in text.items() if name in accepted}
    target: Batch = {"decoder_input_ids": tokens(ROWS, 8)}
    if "input_ids" in accepted:
        yield text
        yield text | target
    size = _field(config, "image_size", "input_size", default=64)
    channels = _field(config, "num_channels", "in_channels", "in_chans", default=3)
    frames = _field(config, "num_frames", default=4)
    bins = ("num_mel_bins", "feature_size", "input_feat_per_channel", "input_dim", "n_mels")
    bins += ("feature_projection_input_dim",)
    mel = _field(config, *bins, default=80)
    positions = _field(config, "max_source_positions", default=32)
    hidden = _field(config, "hidden_size", "d_model", default=64)
    sensed = [
        ("pixel_values", normal(ROWS, channels, size, size)),
        ("pixel_values", normal(ROWS, channels, 64, 64)),
        ("pixel_values", normal(ROWS, frames, channels, size, size)),
        ("pixel_values_videos", normal(ROWS, frames, channels, size, size)),
        ("input_features", normal(ROWS, 64, mel)),
        ("input_features", normal(ROWS, mel, 2 * positions)),
        ("input_values", normal(ROWS, 4000)),
        ("input_values", normal(ROWS, 1, 4000)),
        ("input_values", normal(ROWS, _field(config, "max_length", default=64), mel)),
    ]
    for name, value in sensed:
        yield {name: value}
        yield text | {name: value}
        yield target | {name: value}
    yield from _series(config, normal)
    yield {"hidden_states": normal(ROWS, LENGTH, hidden)}
    yield {"inputs_embeds": normal(ROWS, LENGTH, hidden)}


def _series(config: PretrainedConfig, normal: Any) -> Iterator[Batch]:
    """Inputs of the models that predict time series."""
    past = _field(config, "context_length", default=32)
    future = _field(config, "prediction_length", default=8)
    series = _field(config, "num_input_channels", "input_size", default=1)
    yield {"past_values": normal(ROWS, past, series)}
    yield {
        "past_values": normal(ROWS, past, series),
        "future_values": normal(ROWS, future, series),
    }
    past += max(getattr(config, "lags_sequence", None) or [0])
    features = _field(config, "num_time_features", default=0)
    yield {
        "past_values": normal(ROWS, past).abs(),
        "past_time_features": normal(ROWS, past, features),
        "past_observed_mask": torch.ones(ROWS, past),
        "future_values": normal(ROWS, future).abs(),
        "future_time_features": normal(ROWS, future, features),
    }


def _labelled(model: PreTrainedModel, accepted: set[str], inputs: Batch) -> Iterator[Batch]:
    """The inputs with labels of each shape that a loss may want, and without any."""
    generator = torch.Generator().manual_seed(2)
    classes = getattr(model.config, "num_labels", 2) or 2
    ids, pixels = inputs.get("input_ids"), inputs.get("pixel_values")

    def drawn(*shape: int, least: int = 0, most: int = classes) -> Tensor:
        return torch.randint(least, most, shape, generator=generator)

    if "labels" in accepted:
        labels: list[Any] = []
        name = type(model).__name__
        if pixels is not None and re.search("Detection|Segmentation", name):
            labels += [_boxes(pixels), drawn(ROWS, *pixels.shape[-2:])]
        if re.search("CTC|RNNT|TDT", name):
            labels += [drawn(ROWS, 4, least=5, most=20)]
        if re.search("SequenceClass|ImageClass|VideoClass|AudioClass", name):
            labels += [drawn(ROWS)]
        if ids is not None:
            each = [ids.clone(), drawn(*ids.shape)]
            labels += each[::-1] if "TokenClass" in name else each
        labels += [drawn(ROWS, 8, least=5, most=20), drawn(ROWS)]
        if pixels is not None:
            labels += [drawn(ROWS, *pixels.shape[-2:]), pixels]
            labels += [torch.rand(ROWS, *pixels.shape[-2:], generator=generator)]
        yield from ({**inputs, "labels": each} for each in labels)
    if "start_positions" in accepted:
        ends = {"start_positions": torch.tensor([1, 2]), "end_positions": torch.tensor([3, 4])}
        yield inputs | ends
    if "mask_labels" in accepted and pixels is not None:
        both = _boxes(pixels)
        yield inputs | {
            "mask_labels": [row["masks"] for row in both],
            "class_labels": [row["class_labels"] for row in both],
        }
    if "bool_masked_pos" in accepted and pixels is not None:
        patches = (pixels.shape[-1] // _field(model.config, "patch_size", default=16)) ** 2
        if pixels.ndim == 5:
            patches *= pixels.shape[1] // _field(model.config, "tubelet_size", default=2)
        mask = torch.arange(patches).expand(ROWS, -1) < max(1, patches // 2)
        yield inputs | {"bool_masked_pos": mask}
    if "return_loss" in accepted:
        yield inputs | {"return_loss": True}
    yield inputs


def _boxes(pixels: Tensor) -> list[Batch]:
    """Two objects in each picture, with boxes and masks."""
    generator = torch.Generator().manual_seed(3)
    boxes = torch.tensor([[0.3, 0.3, 0.2, 0.2], [0.6, 0.6, 0.3, 0.2]])
    masks = torch.rand(2, *pixels.shape[-2:], generator=generator).round()
    row = {"class_labels": torch.tensor([0, 1]), "boxes": boxes, "masks": masks}
    return [dict(row) for _ in range(ROWS)]


def _vocabulary(model: PreTrainedModel) -> int:
    try:
        embedding: Any = model.get_input_embeddings()
        return min(VOCABULARY, embedding.weight.shape[0])
    except (AttributeError, NotImplementedError):
        return min(VOCABULARY, _field(model.config, "vocab_size", default=100))


def _field(config: PretrainedConfig, *names: str, default: int) -> int:
    """A number of the configuration or the nearest of its parts that has one of the names."""
    todo = [config]
    while todo:
        part = todo.pop(0)
        for name in names:
            value = getattr(part, name, None)
            if isinstance(value, list | tuple) and value:
                value = value[-1]
            if isinstance(value, int) and not isinstance(value, bool):
                return value
        todo += [each for each in vars(part).values() if isinstance(each, PretrainedConfig)]
    return default
