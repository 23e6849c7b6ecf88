"""A tiny model of an architecture of transformers, trained for some steps in one precision.

``trainable`` finds what can be trained: the first model class, configuration and batch with a loss,
or a stand-in for one. ``train`` makes that model anew, with the same weights, and trains it.
"""

from __future__ import annotations

import importlib
import inspect
import re
import tempfile
import warnings
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers.models
from tiny_batches import Batch, batches
from tiny_configs import tiny_config
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

import torch_bf16

MODES = ("bf16-stochastic", "bf16-fp32-master")
WAYS = ("fp32", "autocast", *MODES)
# From weights rounded to bf16: how far that alone leads, with stock torch.
ROUNDED = ("fp32-rounded", "autocast-rounded")
STEPS, LEARNING_RATE, MOST_PARAMETERS, CLASSES = 6, 1e-3, 25_000_000, 5
FOLDER = Path(transformers.models.__file__).parent
# Language models first, as most architectures have one; then what else has labels.
_HEADS = re.compile(
    r"(?P<language>For(ConditionalGeneration|CausalLM|SpeechSeq2Seq|CTC)|LMHeadModel)$"
    r"|(?P<other>For(\w*(Classification|Detection|Segmentation|Answering)|MaskedLM"
    r"|PreTraining|Prediction|DepthEstimation|MaskedImageModeling))$"
)


@dataclass
class Trainable:
    """What can be trained: a class, a configuration and a batch."""

    model_class: type[PreTrainedModel]
    config: PretrainedConfig
    batch: Batch
    has_loss: bool

    def model(self) -> PreTrainedModel:
        return _made(self.model_class, self.config)


def architectures() -> list[str]:
    """The folders of transformers that hold models."""
    return sorted({each.parent.name for each in FOLDER.glob("*/modeling_*.py")})


def trainable(folder: str) -> Trainable:
    """The first class, configuration and batch of a folder that train in fp32.

    Raises:
        RuntimeError: None does; the message holds why.
    """
    found, reasons = None, []
    for model_class in _model_classes(folder)[:CLASSES]:
        why = ""
        try:
            config = tiny_config(model_class.config_class)  # pyright: ignore
            model = _made(model_class, config)
        except Exception as error:
            reasons.append(f"{model_class.__name__}: {_brief(error)}")
            continue
        for batch in batches(model):
            try:
                has_loss = _learns(model, batch)
            except Exception as error:
                why = why or _brief(error)
                continue
            if has_loss:
                return Trainable(model_class, config, batch, has_loss=True)
            if has_loss is False and found is None:
                found = Trainable(model_class, config, batch, has_loss=False)
        reasons.append(f"{model_class.__name__}: {why or 'no loss with a gradient'}")
    if found is None:
        raise RuntimeError("; ".join(reasons) or "no model classes")
    return found


def train(case: Trainable, way: str, steps: int = STEPS) -> dict[str, Any]:
    """Losses of the steps and of an evaluation, and how far the parameters moved."""
    model = case.model()
    if way in ROUNDED:
        with torch.no_grad():
            for p in model.parameters():
                p.copy_(p.bfloat16())
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    buffers = {name: each.dtype for name, each in model.named_buffers()}
    found: dict[str, Any] = {"losses": []}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        # About the machine, not the model.
        warnings.filterwarnings("ignore", "this CPU takes")
        if way in MODES:
            model, optimizer = torch_bf16.prepare(model, optimizer, way)
            # Not at the end: some models recast a buffer themselves, to what they add it to.
            found["recast"] = [n for n, b in model.named_buffers() if b.dtype != buffers[n]]
        before = _parameters(model, optimizer, way)
        bf16 = way in ("autocast", "autocast-rounded", *MODES)
        for _ in range(steps):
            loss, _ = _loss(model, case.batch, bf16)
            found["losses"].append(loss.item())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        model.eval()
        found["evaluated"] = None
        with torch.no_grad(), suppress(Exception):  # some only have outputs for training
            found["evaluated"] = _loss(model, case.batch, bf16)[0].item()
    after = _parameters(model, optimizer, way)
    if way in MODES:
        found["warned"] = [str(each.message) for each in caught if "bf16" in str(each.message)]
    # Of a few elements all may stay by chance.
    found["moved"] = {
        name: (after[name] - p).norm().item() for name, p in before.items() if p.numel() >= 32
    }
    return found


def kept_in_fp32(case: Trainable) -> dict[str, list[str]]:
    """The parameters that we keep in fp32, and those that transformers does, loading in bf16."""
    model = case.model()
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        loaded: Any = case.model_class.from_pretrained(folder, dtype=torch.bfloat16)
    models = {"ours": torch_bf16.cast_model(model), "theirs": loaded}
    return {
        whose: sorted(n for n, p in each.named_parameters() if p.dtype == torch.float32)
        for whose, each in models.items()
    }


def _parameters(model: nn.Module, optimizer: Any, way: str) -> dict[str, Tensor]:
    """Copies of what is trained, in fp32."""
    every = dict(model.named_parameters())
    if way in MODES:
        every |= torch_bf16.fp32_state_dict(model, optimizer)
    return {name: every[name].detach().float().clone() for name, _ in model.named_parameters()}


def _model_classes(folder: str) -> list[type[PreTrainedModel]]:
    found: list[type[PreTrainedModel]] = []
    for file in sorted((FOLDER / folder).glob("modeling_*.py")):
        name = f"transformers.models.{folder}.{file.stem}"
        try:
            module = importlib.import_module(name)
        except ImportError:
            continue
        found += [
            each
            for each in vars(module).values()
            if inspect.isclass(each)
            and issubclass(each, PreTrainedModel)
            and each.__module__ == name
            and each.config_class is not None
            and not each.__name__.endswith("PreTrainedModel")
        ]

    def rank(model_class: type[PreTrainedModel]) -> int:
        head = _HEADS.search(model_class.__name__)
        if head:
            return 0 if head["language"] else 1
        accepted = inspect.signature(model_class.forward).parameters
        return 2 if {"labels", "return_loss"} & accepted.keys() else 3

    return sorted(found, key=rank)


def _made(model_class: type[PreTrainedModel], config: PretrainedConfig) -> PreTrainedModel:
    """The same model each time."""
    with torch.device("meta"), suppress(NotImplementedError, RuntimeError):
        count = model_class(config).num_parameters()
        if count > MOST_PARAMETERS:
            raise ValueError(f"{count} parameters are not tiny")
    torch.manual_seed(0)
    model = model_class(config).float()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model.train()


def _learns(model: PreTrainedModel, batch: Batch) -> bool | None:
    """Whether the model has a loss of its own; None if the batch gives no gradients."""
    loss, has_loss = _loss(model, batch, bf16=False)
    if not loss.isfinite():
        return None
    loss.backward()
    learns = any(p.grad is not None and bool(p.grad.any()) for p in model.parameters())
    model.zero_grad()
    return has_loss if learns else None


def _loss(model: nn.Module, batch: Batch, bf16: bool) -> tuple[Tensor, bool]:
    """The model's loss, or the distance of its first output from noise, and which of both."""
    torch.manual_seed(0)  # what is drawn is not what is compared
    with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        output = model(**batch)
        loss: Any = getattr(output, "loss", None)
        if isinstance(loss, Tensor) and (loss.requires_grad or not torch.is_grad_enabled()):
            return loss.float().mean(), True
    first = _first_output(output)
    if first is None:
        raise ValueError("no output with a gradient")
    noise = torch.randn(first.shape, generator=torch.Generator().manual_seed(7))
    return (first.float() - noise).square().mean(), False


def _first_output(output: Any) -> Tensor | None:
    if isinstance(output, Tensor):
        differentiable = output.requires_grad or not torch.is_grad_enabled()
        usable = output.is_floating_point() and output.numel() > 1 and differentiable
        return output if usable else None
    if isinstance(output, dict):
        output = list(output.values())
    if isinstance(output, list | tuple):
        return next((t for t in map(_first_output, output) if t is not None), None)
    return None


def _brief(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:200]
