"""The command line: ``python -m torch_bf16 {info,bench,export}``."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from .backends import explain, name_of_chosen
from .bench import BASELINE, CONTENDERS, measure, peak_bytes, random_shapes
from .errors import CheckpointError
from .export import export_file
from .recipe import RECIPES

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command.

    Args:
        arguments: without the program's name; those of the process if None.

    Returns:
        The exit status.
    """
    parser = argparse.ArgumentParser("python -m torch_bf16", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("info", help="versions, recipes, and which backend runs where, and why")
    bench = commands.add_parser("bench", help="time AdamW steps beside torch's fused fp32 one")
    bench.add_argument("--parameters", type=_count, default=50_000_000, metavar="N")
    bench.add_argument("--tensors", type=_count, default=150, metavar="N")
    bench.add_argument("--rounds", type=_count, default=30, metavar="N")
    bench.add_argument("--threads", type=_count, default=torch.get_num_threads(), metavar="N")
    bench.add_argument(
        "--recipes", nargs="+", choices=CONTENDERS[1:], default=CONTENDERS[1:], metavar="NAME"
    )
    bench.add_argument("--json", type=_file, metavar="FILE", help="write the figures there, too")
    export = commands.add_parser("export", help="write the exact fp32 weights of a checkpoint")
    export.add_argument("checkpoint", type=Path, help="of save_checkpoint, torch or Lightning")
    export.add_argument("output", type=_file, help="*.safetensors, else a file of torch.save")
    export.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    export.add_argument(
        "--optimizer", type=Path, metavar="FILE", help="its state dict, where it is in another file"
    )
    options = parser.parse_args(arguments)
    if options.command == "export":
        return _export(options)
    return _info() if options.command == "info" else _bench(options)


def _export(options: argparse.Namespace) -> int:
    try:
        print(export_file(options.checkpoint, options.output, options.dtype, options.optimizer))
    except (CheckpointError, OSError) as error:
        print(f"python -m torch_bf16 export: {error}", file=sys.stderr)
        return 1
    return 0


def _info() -> int:
    print(_versions())
    print(f"threads: {torch.get_num_threads()} of {os.cpu_count()}")
    print("\nrecipes (formats; bytes per parameter without the gradient, AdamW):")
    for name, recipe in RECIPES.items():
        formats = f"{recipe.weights} / {recipe.exp_avg} / {recipe.exp_avg_sq}"
        alias = "" if name == recipe.name else f"  (alias of {recipe.name})"
        print(f"  {name:22} {formats:50} {recipe.bytes_per_parameter:3}{alias}")
    devices = [torch.device("cpu")]
    if torch.cuda.is_available():
        devices.append(torch.device("cuda"))
    for device in devices:
        chosen = name_of_chosen(device)
        print(f"\nbackends for {device}:")
        for name, reason in explain(device).items():
            state = "works" if reason is None else f"not here: {reason}"
            print(f"  {name:8} {state}{'  <- used' if name == chosen else ''}")
    return 0


def _bench(options: argparse.Namespace) -> int:
    shapes = random_shapes(options.parameters, options.tensors)
    total = sum(int(np.prod(shape)) for shape in shapes)
    print(_versions())
    print(
        f"AdamW, {total:,} parameters in {len(shapes)} tensors, {options.threads} threads, "
        f"{options.rounds} interleaved rounds; medians, in brackets the 10th and 90th percentile\n"
    )
    results = measure(tuple(options.recipes), shapes, options.rounds, options.threads)
    print(
        f"{'':22}{'ms per step':>24}{'ns/element':>12}{'ratio to torch':>24}{'bytes':>8}{'peak':>8}"
    )
    rows = []
    for result in results:
        peak = peak_bytes(result.name, shapes, options.threads)
        row = {
            "name": result.name,
            "ms": _spread(result.seconds * 1e3),
            "ns_per_element": float(np.median(result.seconds)) / total * 1e9,
            "ratio": _spread(result.ratios),
            "bytes_per_parameter": result.bytes_allocated / total,
            "peak_bytes_per_parameter": None if peak is None else peak / total,
        }
        rows.append(row)
        shown = "-" if peak is None else f"{row['peak_bytes_per_parameter']:.2f}"
        print(
            f"{result.name:22}{_bracket(row['ms'], 1):>24}{row['ns_per_element']:12.3f}"
            f"{_bracket(row['ratio'], 2):>24}{row['bytes_per_parameter']:8.2f}{shown:>8}"
        )
    print(
        f"\nratio: time divided by that of {BASELINE!r} in the same round. bytes: weights, "
        "gradients and states per parameter, as allocated. peak: growth of a process's peak memory."
    )
    if options.json:
        record = {"versions": _versions(), "parameters": total, "tensors": len(shapes)}
        record |= {"threads": options.threads, "rounds": options.rounds, "results": rows}
        options.json.write_text(json.dumps(record, indent=2) + "\n")
    return 0


def _versions() -> str:
    parts = [f"torch-bf16 {importlib.metadata.version('torch-bf16')}", f"torch {torch.__version__}"]
    for name in ("numba", "triton", "lightning", "accelerate"):
        try:
            parts.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            parts.append(f"no {name}")
    return ", ".join([*parts, f"Python {platform.python_version()}", _processor()])


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _spread(values: np.ndarray) -> dict[str, float]:
    low, median, high = np.percentile(values, [10, 50, 90])
    return {"median": float(median), "p10": float(low), "p90": float(high)}


def _bracket(spread: dict[str, float], digits: int) -> str:
    return f"{spread['median']:.{digits}f} [{spread['p10']:.{digits}f}, {spread['p90']:.{digits}f}]"


def _file(text: str) -> Path:
    # Asked now, not after minutes of measuring.
    path = Path(text)
    if path.is_dir() or not path.parent.is_dir():
        why = "is a folder" if path.is_dir() else "is in a folder that does not exist"
        raise argparse.ArgumentTypeError(f"{text!r} {why}; give the name of a file to write")
    return path


def _count(text: str) -> int:
    try:
        value = int(float(text))
    except (ValueError, OverflowError):
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    return value
