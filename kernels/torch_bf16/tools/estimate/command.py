"""``python -m torch_bf16 estimate``: its options, and what it does with them."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

import torch

from torch_bf16.recipe import ACCUMULATIONS, OFFLOADS, REDUCTIONS
from torch_bf16.rules import MUON
from torch_bf16.tools.arguments import add_json_argument, count_to, keep_inputs, refuse
from torch_bf16.tools.output import publish

from .activations import Activations, batch_argument
from .memory import memory
from .optimizers import OPTIMIZERS, OptimizerSpec, optimizer_spec
from .precisions import precisions
from .report import row, show
from .shapes import ModelShapes
from .sharded import traffic
from .sources import KINDS, model_shapes
from .zero import zero_rows

__all__ = ["add_estimate_arguments", "estimate"]

_DEVICES = ("meta", "cpu", "cuda")
_MOST_RANKS = 100_000


def add_estimate_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("model", metavar="MODEL", help=KINDS)
    parser.add_argument(
        "--ranks",
        type=count_to(_MOST_RANKS, "ranks"),
        default=8,
        metavar="N",
        help="number of ranks of FSDP2 or DeepSpeed (default: 8; 1 for no sharding)",
    )
    parser.add_argument(
        "--optimizer",
        default="AdamW",
        metavar="NAME",
        help=f"{', '.join(OPTIMIZERS)}, or with options: 'SGD(momentum=0.9)' (default: AdamW)",
    )
    parser.add_argument(
        "--accumulate",
        choices=ACCUMULATIONS,
        help="a step of several passes, and the recipes' sums of their gradients; bf16_nearest is "
        "torch's own way (default: one pass)",
    )
    parser.add_argument(
        "--reduce",
        choices=REDUCTIONS,
        help="how the recipes' gradients are sent between ranks (default: as FSDP2 does it)",
    )
    parser.add_argument(
        "--offload",
        choices=OFFLOADS,
        default="none",
        help="what the recipes keep in host memory, in the column 'host' (default: nothing)",
    )
    parser.add_argument(
        "--batch",
        type=batch_argument,
        metavar="SHAPE",
        help="measure activations by a step over it: 8x1024, or 8x3x224x224:float32,8:int64",
    )
    parser.add_argument(
        "--device",
        choices=_DEVICES,
        help="where that step runs (default: meta, traced without memory)",
    )
    add_json_argument(parser)


def estimate(options: argparse.Namespace) -> int:
    """Say how much memory a run will take.

    Returns:
        The exit status: 0.

    Raises:
        ValueError, OSError, RuntimeError, ImportError: MODEL or an option cannot be used.
    """
    keep_inputs(options.json, options.model)
    _settle(options)
    optimizer, shapes = optimizer_spec(options.optimizer), model_shapes(options.model)
    if not shapes.trained:
        raise ValueError(f"{shapes.source} is a model without trainable parameters")
    rules = {optimizer.rule_of(each) for each in shapes.weights}
    roles = {state.role for rule in rules for state in rule.states} & {"exp_avg", "exp_avg_sq"}
    notes, zero = _notes(shapes, optimizer, options), []
    if options.ranks > 1:
        ours = precisions(options.accumulate, roles=roles)
        zero = [*zero_rows(shapes, optimizer, ours, options.ranks)]
    found = {
        "schema": 1,
        "kind": "estimate",
        "model": shapes.source,
        "parameters": shapes.numel,
        "trained": shapes.trained,
        "optimizer": optimizer.name,
        "ranks": options.ranks,
        "accumulate": options.accumulate,
        "reduce": options.reduce,
        "offload": options.offload,
        "batch": _batch_text(options),
        "rows": [*_rows(shapes, optimizer, options, roles)],
        "zero": zero,
        "notes": [*notes, *_zero_notes(shapes, options)] if zero else notes,
    }
    publish(found, options.json, show)
    return 0


def _settle(options: argparse.Namespace) -> None:
    """Refuse options that would be ignored, and set the defaults of those that were left out."""
    if options.batch is None:
        refuse(options, ("device",), "without --batch no step runs")
    if options.ranks == 1:
        refuse(options, ("reduce",), "--ranks 1 sends nothing")
    options.device, options.reduce = options.device or "meta", options.reduce or "wrapper"
    if options.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: torch sees no GPU here; --device meta needs none")


def _rows(
    shapes: ModelShapes, optimizer: OptimizerSpec, options: argparse.Namespace, roles: set[str]
) -> Iterator[dict[str, Any]]:
    measured, passes, ranks = None, options.accumulate is not None, options.ranks
    if options.batch is not None:
        if shapes.model is None:
            raise ValueError(
                f"--batch takes a step, and {shapes.source} is not a model that can: give "
                "module:factory, or a config.json that transformers builds a model from"
            )
        measured = Activations(shapes.model, options.batch, torch.device(options.device))
    for precision in precisions(options.accumulate, options.reduce, options.offload, roles):
        if precision.recipe is None and optimizer.scratch is None:
            continue
        each = shapes, precision, optimizer
        sharded = (memory(*each, ranks), traffic(*each, ranks)) if ranks > 1 else None
        yield row(precision, memory(*each), measured, sharded, passes, ranks)


def _notes(shapes: ModelShapes, optimizer: OptimizerSpec, options: argparse.Namespace) -> list[str]:
    notes = list(shapes.notes)
    if options.batch is None:
        notes.append("activations are not counted: --batch 8x1024 measures them by one step")
    elif options.device == "meta":
        notes.append(
            f"activations: one step over {_batch_text(options)}, traced for the CPU's kernels; "
            "those of GPUs hold a little more or less"
        )
    else:
        notes.append(f"activations: one step over {_batch_text(options)} on {options.device}")
    if options.offload != "none":
        notes.append(
            "host: bytes of pinned memory of each process, which torch allocates in powers of two "
            "per tensor; a step copies them to the device and back"
        )
    if optimizer.scratch is None:
        notes.append(f"torch has no {options.optimizer} of its own")
    else:
        how = "with foreach=True, its default on GPUs; fused=True holds no scratch"
        if optimizer.fused:
            how = "with fused=True"
        elif optimizer.steps_singly(optimizer.rule):
            how = "one tensor after the other"
        notes.append(
            f"peak of torch's precisions: {how}. bf16-true rounds to nearest and loses updates"
        )
    if optimizer.rule.stage_states:
        notes.append(
            f"{optimizer.rule.name.title()} works on whole matrices: each has a rank that owns it; "
            "the recipes' peaks count what an owner gathers and computes with, 'sent per step' "
            "what is sent to owners and by them"
        )
        if optimizer.rule is MUON and any(each.hidden is None for each in shapes.weights):
            notes.append(
                "without a module, embeddings, which are AdamW's, look like other matrices: all "
                "are counted as Muon's"
            )
    notes.append(
        "three formats in a name are those of weights and moments: "
        'get_recipe("bf16-stochastic", weights=..., exp_avg=..., exp_avg_sq=...)'
    )
    if options.ranks > 1:
        notes.append(
            "DDP's buckets are a copy of all gradients, which stays even if gradients are "
            "released; with gradient_as_bucket_view=True the buckets are the gradients"
        )
        notes.append(
            "at a rank's peak, the weights of the root and of two layers are whole, and one "
            "layer's gradients are reduced, in fp32; a numbered module is a layer, and is gathered "
            "twice"
        )
        if options.reduce == "bf16_wire":
            notes.append(
                "the recipes send gradients in bf16, and hold one layer's in fp32 and twice in "
                "bf16: as they are sent and as they are received"
            )
    return notes


def _zero_notes(shapes: ModelShapes, options: argparse.Namespace) -> list[str]:
    notes = [
        "ZeRO: without gradients, DeepSpeed's buckets for messages (reduce_bucket_size), and what "
        "ZeRO-3 leaves whole (stage3_param_persistence_threshold)"
    ]
    if any(each.stays_fp32 for each in shapes.weights):
        notes.append("recipes keep batch norm in fp32, but DeepSpeed casts it: none trains there")
    elif options.accumulate not in (None, "bf16_nearest"):
        notes.append("DeepSpeed sums micro-batches itself: --accumulate has no effect there")
    return notes


def _batch_text(options: argparse.Namespace) -> str | None:
    if options.batch is None:
        return None
    parts = [
        "x".join(map(str, shape)) + (f":{str(dtype).removeprefix('torch.')}" if dtype else "")
        for shape, dtype in options.batch
    ]
    return ",".join(parts)
