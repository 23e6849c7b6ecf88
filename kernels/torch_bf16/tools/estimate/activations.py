"""Measure what a forward and a backward pass hold beside the weights, by running them once."""

from __future__ import annotations

import argparse
import copy
import inspect
import logging
import re
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from torch_bf16.errors import described
from torch_bf16.model.casting import cast_model

from .live import LiveBytes
from .precisions import Precision

__all__ = ["Activations", "Batch", "batch_argument", "peak_of_pass"]

_PART = re.compile(r"(\d+(?:x\d+)*)(?::(\w+))?")
_TOKENS = "input_ids"
# What every module has, besides what its class gives it.
_BARE = nn.Module()
# How torch says that it takes whole numbers where it was given others.
_INTEGERS = re.compile(r"\b(long|int64)", re.IGNORECASE)
_MOST_ELEMENTS = 10**15
# torch reports that a CPU is out of memory by a mere RuntimeError that names its allocator.
_CPU_ALLOCATOR = "DefaultCPUAllocator"


Batch = Sequence[tuple[tuple[int, ...], torch.dtype | None]]
"""The inputs of one step in the order in which ``forward`` takes them: shapes, and dtypes, of which
None is int64 if the model takes tokens, else fp32."""


def batch_argument(text: str) -> Batch:
    """The type of ``--batch``: ``8x1024``, or ``8x3x224x224:float32,8:int64``."""
    found = []
    for part in text.split(","):
        match = _PART.fullmatch(part)
        dtype = getattr(torch, match[2], None) if match and match[2] else None
        if not match or (match[2] and not isinstance(dtype, torch.dtype)):
            raise argparse.ArgumentTypeError(
                f"{part!r} is not a shape such as 8x1024 or 8x3x224x224:float32"
            )
        shape = tuple(map(int, match[1].split("x")))
        if 0 in shape:
            raise argparse.ArgumentTypeError(f"{part!r} has no elements")
        if prod(shape) > _MOST_ELEMENTS:
            raise argparse.ArgumentTypeError(f"{part!r} has more than {_MOST_ELEMENTS:,} elements")
        found.append((shape, dtype))
    return found


class Activations:
    """What passes of a model hold beside what is counted without them, each kind measured once.

    Args:
        model: on the meta device; not changed.
        batch: the inputs of a pass.
        device: as for :func:`peak_of_pass`.
    """

    def __init__(self, model: nn.Module, batch: Batch, device: torch.device) -> None:
        self._model, self._batch, self._device = model, batch, device
        self._live: dict[tuple[Any, ...], int] = {}

    def alone(self, precision: Precision, gradients: int, passes: bool) -> int:
        """Bytes on one device, beside all that lives at the end of a backward pass.

        Args:
            precision: how numbers are kept.
            gradients: bytes of gradients at the end of the pass. If no earlier pass left them
                there, they take the place of activations as these are freed.
            passes: whether a step has several passes. From the second on, gradients that add up
                beside the weights are there all the time.

        Raises:
            ValueError, MemoryError: as :func:`peak_of_pass`.
        """
        if passes and precision.waiting is None:
            return self._measured(precision, 0)
        return max(0, self._measured(precision, precision.waiting) - gradients)

    def on_rank(self, precision: Precision, gradients: int, passes: bool, ranks: int) -> int:
        """Bytes on each of several ranks, as :meth:`alone`, beside what is gathered and reduced.

        Args:
            precision: how numbers are kept.
            gradients: bytes of the rank's parts of gradients.
            passes: whether a step has several passes.
            ranks: the number of ranks.

        Raises:
            ValueError, MemoryError: as :func:`peak_of_pass`.
        """
        # Weights are gathered in bf16: autocast holds no bf16 copies of them until backward.
        dtype = torch.bfloat16 if precision.autocast else precision.dtype
        gathered = replace(precision, dtype=dtype)
        without = self._measured(gathered, 0)
        if passes or precision.waiting is not None:
            return without
        # Parts of gradients take little of the place of activations: no moment holds more than
        # the peaks with none and with all of the gradients, weighted by the part.
        part = precision.dtype.itemsize / dtype.itemsize / ranks
        both = without + part * (self._measured(gathered, None) - without)
        return max(0, round(both) - gradients)

    def _measured(self, precision: Precision, waiting: int | None) -> int:
        # Casts of all recipes are alike, and what they keep beside a weight is in no pass.
        kind = precision.dtype, precision.autocast, precision.recipe is None, waiting
        if kind not in self._live:
            self._live[kind] = peak_of_pass(
                self._model, precision, self._batch, self._device, waiting
            )
        return self._live[kind]


def peak_of_pass(
    model: nn.Module, precision: Precision, batch: Batch, device: torch.device, waiting: int | None
) -> int:
    """The most bytes that one forward and backward pass hold at once beside the weights.

    Args:
        model: on the meta device; not changed.
        precision: how it is cast.
        batch: the inputs.
        device: meta, to trace the CPU's kernels over tensors without memory; or a CPU or a GPU, to
            take the step there, which a GPU's allocator measures.
        waiting: bytes of gradients that wait to be freed within the backward pass; 0 frees each as
            it arrives, None keeps all, and they are counted.

    Raises:
        ValueError: the model cannot take such a batch.
        MemoryError: the step does not fit on the device.
    """
    traced = device.type == "meta"
    place = torch.device("cpu") if traced else device
    model = _cast(copy.deepcopy(model), precision)
    with _traced() if traced else nullcontext():
        inputs: Any = []
        try:
            _materialise(model, place)
            model.train()
            if waiting is not None:
                taken = _Taken(waiting)
                for parameter in model.parameters():
                    if parameter.requires_grad:
                        parameter.register_post_accumulate_grad_hook(taken)
            inputs = _inputs(model, batch, place)
            try:
                return _peak(model, inputs, precision, device)
            except Exception as error:
                if not isinstance(inputs, Mapping) or "labels" not in inputs or _is_full(error):
                    raise
                # Frames of the failed step hold its tensors.
                traceback.clear_frames(error.__traceback__)
                try:
                    # A label for each token is not what every class takes.
                    unlabelled = {_TOKENS: inputs[_TOKENS]}
                    return _peak(model, unlabelled, precision, device)
                except Exception as other:
                    raise other if _is_full(other) else error from None
        # A user's model may raise anything.
        except Exception as error:
            if _is_full(error):
                raise MemoryError(
                    f"{precision.name} does not fit on {device} with such a batch: {error}. Trace "
                    "it without memory (--device meta), or take a smaller batch"
                ) from error
            shapes = ", ".join(f"{tuple(each.shape)} {each.dtype}" for each in tree_leaves(inputs))
            how = "traced without numbers (--device cpu or cuda takes a real step)"
            raise ValueError(
                f"{type(model).__name__} took no step over a batch of {shapes} in "
                f"{precision.name}{', ' + how if traced else ''}: "
                f"{described(error).rstrip('.')}{_for_tokens(batch, inputs, error)}"
            ) from error


@contextmanager
def _traced() -> Iterator[None]:
    """Tensors without memory; what they cannot do is raised, and not logged as well."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    disabled, log.disabled = log.disabled, True
    try:
        with FakeTensorMode():
            yield
    finally:
        log.disabled = disabled


def _is_full(error: Exception) -> bool:
    return isinstance(error, torch.OutOfMemoryError) or _CPU_ALLOCATOR in str(error)


def _peak(model: nn.Module, inputs: Any, precision: Precision, device: torch.device) -> int:
    """The most bytes at once in a step, beside those that are there before."""
    if device.type == "cuda":
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        _step(model, inputs, precision, device)
        return torch.cuda.max_memory_allocated(device) - before
    with LiveBytes() as live:
        _step(model, inputs, precision, torch.device("cpu"))
    return live.peak


def _cast(model: nn.Module, precision: Precision) -> nn.Module:
    if precision.recipe is not None:
        return cast_model(model, precision.recipe)
    return model.to(precision.dtype) if precision.dtype != torch.float32 else model


def _materialise(model: nn.Module, device: torch.device) -> None:
    """Give a model memory of its own on a device; tied weights stay tied."""
    copies: dict[int, Any] = {}

    def memory_for(tensor: Tensor) -> Any:
        if id(tensor) not in copies:
            new = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
            new = new.normal_(0, 0.02) if new.is_floating_point() else new.zero_()
            if isinstance(tensor, nn.Parameter):
                new = nn.Parameter(new, tensor.requires_grad)
            # Beside the old tensor, whose id must not be reused.
            copies[id(tensor)] = new, tensor
        return copies[id(tensor)][0]

    for module in model.modules():
        for held in (module._parameters, module._buffers):
            held.update({k: memory_for(each) for k, each in held.items() if each is not None})
        # Tensors that are mere attributes, and lists of weights, as those of nn.LSTM.
        plain = {k: each for k, each in vars(module).items() if k not in vars(_BARE)}
        for name, each in plain.items():
            if any(isinstance(leaf, Tensor) for leaf in tree_leaves(each)):
                vars(module)[name] = tree_map_only(Tensor, memory_for, each)


def _inputs(model: nn.Module, batch: Batch, device: torch.device) -> Any:
    taken = inspect.signature(model.forward).parameters
    tokens = _TOKENS in taken
    tensors = []
    for shape, dtype in batch:
        dtype = dtype or (torch.int64 if tokens else torch.float32)
        floats = dtype.is_floating_point
        tensors.append((torch.randn if floats else torch.zeros)(shape, dtype=dtype, device=device))
    if not tokens or len(tensors) > 1:
        return tensors
    return {name: tensors[0] for name in (_TOKENS, "labels") if name in taken}


def _for_tokens(batch: Batch, inputs: Any, error: Exception) -> str:
    """How to ask for tokens, if inputs without a dtype were taken to be fp32, and this failed."""
    if isinstance(inputs, Mapping) or all(dtype is not None for _, dtype in batch):
        return ""
    if not _INTEGERS.search(str(error)):
        return ""
    shapes = ("x".join(map(str, shape)) for shape, dtype in batch if dtype is None)
    return f". Inputs are fp32 unless said: --batch {','.join(f'{each}:int64' for each in shapes)}"


def _step(model: nn.Module, inputs: Any, precision: Precision, device: torch.device) -> None:
    autocast = precision.autocast or precision.recipe is not None
    with torch.autocast(device.type, torch.bfloat16, enabled=autocast):
        if precision.dtype == torch.bfloat16 and not autocast:
            inputs = tree_map(lambda x: x.bfloat16() if x.is_floating_point() else x, inputs)
        output = model(**inputs) if isinstance(inputs, Mapping) else model(*inputs)
        loss = getattr(output, "loss", None)
        if not isinstance(loss, Tensor):
            loss = _mean(output)
    del output
    loss.backward()


def _mean(output: Any) -> Tensor:
    leaves = tree_leaves(dict(output) if isinstance(output, Mapping) else output)
    floats = [x for x in leaves if isinstance(x, Tensor) and x.requires_grad]
    if not floats:
        raise ValueError("its output depends on no trainable parameter")
    return torch.stack([each.float().mean() for each in floats]).sum()


class _Taken:
    """Frees gradients as a step or a sum inside the backward pass does, many at a time."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._waiting: list[Tensor] = []
        self._size = 0

    def __call__(self, parameter: Tensor) -> None:
        self._waiting.append(parameter)
        self._size += parameter.nbytes
        if self._size >= self._limit:
            for each in self._waiting:
                each.grad = None
            self._waiting, self._size = [], 0
