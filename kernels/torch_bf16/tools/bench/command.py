"""``python -m torch_bf16 bench``: its options, and what it does with them."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch

from torch_bf16.backends import BACKENDS, choose
from torch_bf16.model.slow_products import bf16_product_ratio
from torch_bf16.recipe import RECIPES
from torch_bf16.tools.arguments import (
    add_json_argument,
    count,
    count_to,
    device_argument,
    keep_apart,
    picture_to_write,
    refuse,
)
from torch_bf16.tools.machine import device_state, versions_line
from torch_bf16.tools.output import INTERRUPTED, command_line, publish, say

from .entries import OURS, Entry, ours
from .models import MODELS, Shapes, random_shapes
from .peaks import measure_peaks, peak_bytes
from .peers import BASELINE, PEERS
from .plot import plot
from .record import record
from .report import table
from .rounds import measure
from .rules import BASE, every_rule
from .training import every_row, peak_of, time_rows
from .training_report import training_record, training_table
from .ways import WAYS, in_ways

__all__ = ["add_bench_arguments", "bench"]

_RANDOM, _PARAMETERS, _TENSORS = "random", 50_000_000, 150
_DEFAULTS: Mapping[str, Any] = {
    "device": torch.device("cpu"),
    "model": _RANDOM,
    "rounds": 30,
    "recipes": list(OURS),
    "against": ["torch"],
    "baseline": BASELINE,
    "ways": [],
    "layers": 2,
    "tokens": 256,
    "time_limit": 600,
}
_MOST_THREADS = 4096
# The system's clocks count no longer waits; these are eleven days.
_MOST_SECONDS = 10**6
_OF_TRAINING = ("layers", "tokens")
_OF_STEPS = ("model", "parameters", "tensors", "against", "baseline", "backend", "ways", "rules")
_OF_CHOICE = ("recipes", "against", "baseline", "ways")
_OF_RUNS = (*_OF_STEPS, *_OF_TRAINING, "device", "rounds", "threads", "recipes", "training")
# Given as words, each with commas or without.
_LISTS = ("recipes", "against", "ways")
_NO_PLOT = "there is no plot of whole training steps"
# How many of a hundred entries are measured at a time, so that noise affects them alike.
_TOGETHER = 8


def add_bench_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("--device", type=device_argument, help="cpu, cuda or cuda:N (default: cpu)")
    parser.add_argument(
        "--model", choices=(*MODELS, _RANDOM), help=f"parameter shapes (default: {_RANDOM})"
    )
    _add_counts(
        parser,
        parameters=f"elements of --model random (default: {_PARAMETERS:,})",
        tensors=f"tensors of --model random (default: {_TENSORS})",
        rounds="interleaved rounds (default: 30)",
    )
    parser.add_argument(
        "--threads",
        type=count_to(_MOST_THREADS, "threads"),
        metavar="N",
        help="threads on a CPU (default: as many as torch uses)",
    )
    recipes = f"recipes to time: {', '.join(OURS)} (default: all)"
    _add_names(parser, "recipes", RECIPES, "recipe", recipes)
    libraries = f"other libraries, if installed: {','.join(PEERS)} (default: torch)"
    _add_names(parser, "against", PEERS, "library", libraries)
    parser.add_argument(
        "--baseline", metavar="NAME", help=f"row that ratios refer to (default: {BASELINE})"
    )
    parser.add_argument(
        "--backend", choices=BACKENDS, help="our backend (default: the one chosen for the device)"
    )
    ways = f"more rows for ours and the baseline: {','.join(WAYS)} (default: none)"
    _add_names(parser, "ways", WAYS, "way", ways)
    parser.add_argument(
        "--rules",
        action="store_true",
        help=f"every elementwise rule in every format, beside AdamW in {BASE}, and nothing else",
    )
    parser.add_argument(
        "--training",
        action="store_true",
        help="whole steps of GPT-2's shape by phase, in fp32, bf16-mixed and ours; nothing else",
    )
    _add_counts(
        parser,
        layers="layers of --training (default: 2)",
        tokens="tokens of --training (default: 256)",
    )
    parser.add_argument(
        "--time-limit",
        type=count_to(_MOST_SECONDS, "seconds"),
        metavar="SECONDS",
        help="time for a compiling library's first steps (default: 600)",
    )
    add_json_argument(parser)
    parser.add_argument(
        "--plot", type=picture_to_write, metavar="FILE", help="draw the times to FILE"
    )
    parser.add_argument(
        "--from",
        type=_record,
        dest="record",
        metavar="FILE",
        help="measure nothing: show, and with --plot draw, a record that --json wrote",
    )


def _add_counts(parser: argparse.ArgumentParser, **options: str) -> None:
    for name, text in options.items():
        parser.add_argument(f"--{name}", type=count, metavar="N", help=text)


def _add_names(
    parser: argparse.ArgumentParser, option: str, known: Collection[str], kind: str, text: str
) -> None:
    def parse(text: str) -> list[str]:
        names = [name for name in text.split(",") if name]
        for name in names:
            if name not in known:
                raise argparse.ArgumentTypeError(
                    f"no {kind} {name!r}; known ones: {', '.join(known)}"
                )
        return names

    parser.add_argument(f"--{option}", type=parse, nargs="+", metavar="NAME", help=text)


def bench(options: argparse.Namespace) -> int:
    """Measure, print, write.

    Returns:
        The exit status: 130 if Ctrl-C ended it early, 1 if one of ours could not be timed.

    Raises:
        BackendUnavailableError, MemoryError, ValueError: an option would have no effect, or what it
            asks for cannot be timed here.
    """
    _settle(options)
    keep_apart({"--json": options.json, "--plot": options.plot})
    if (found := options.record) is None:
        found = (_measure_training if options.training else _measure_steps)(options)
    training = found.get("kind") == "training"

    def show(found: Mapping[str, Any]) -> None:
        if options.record is None and not training:
            print(versions_line(found["versions"]) + ", " + found["hardware"]["processor"])
        print(_table(found))

    publish(found, options.json, show)
    if options.plot:
        plot([found], options.plot)
    if options.record is not None:
        return 0
    if found.get("interrupted"):
        return INTERRUPTED
    return 1 if {*found.get("failed", ())} & {*found.get("ours", ())} else 0


def _settle(options: argparse.Namespace) -> None:
    """Refuse options that would be ignored, and set the defaults of those that were left out."""
    if options.record is not None:
        refuse(options, (*_OF_RUNS, "time_limit"), "--from measures nothing")
        if options.record.get("kind") == "training":
            refuse(options, ("plot",), _NO_PLOT)
    elif options.training:
        refuse(options, ("plot",), _NO_PLOT)
        refuse(options, _OF_STEPS, "--training times whole steps of one model")
    else:
        refuse(options, _OF_TRAINING, "the model of --training is not timed")
        if options.rules:
            refuse(options, _OF_CHOICE, "--rules times its own entries")
    for name, default in {**_DEFAULTS, "threads": torch.get_num_threads()}.items():
        if getattr(options, name) is None:
            setattr(options, name, default)
        elif name in _LISTS:
            setattr(options, name, [each for names in getattr(options, name) for each in names])


def _measure_steps(options: argparse.Namespace) -> dict[str, Any]:
    device, shapes = options.device, _shapes(options)
    options.backend = options.backend or os.environ.get("TORCH_BF16_BACKEND")
    if device.type == "cuda":
        # Timing eager would take minutes; if Triton cannot run, the command says so instead.
        options.backend = options.backend or "triton"
    entries, missing, baseline = _chosen_entries(options)
    failures = {
        each.name: f"needs {each.only_on.upper()}"
        for each in entries
        if each.only_on not in (None, device.type)
    }
    if baseline in failures:
        raise ValueError(
            f"the baseline {baseline!r} {failures[baseline]}: choose another --baseline"
        )
    entries = [each for each in entries if each.name not in failures]
    torch.set_num_threads(options.threads)
    choose(device, options.backend)
    before = device_state(device)
    measured = measure(
        entries,
        shapes,
        device,
        options.rounds,
        say,
        first_seconds=options.time_limit,
        most=_TOGETHER if options.rules else None,
    )
    measured.failures = {**failures, **measured.failures}
    setting = {
        "command": command_line(options.arguments),
        "model": options.model,
        "backend": choose(device, options.backend).name,
        "baseline": baseline,
        "rules": "every elementwise rule" if options.rules else "AdamW",
    }
    peaks: dict[str, int | None] = {}
    # With a hundred entries, the bytes that they hold say enough.
    if device.type == "cpu" and not (options.rules or measured.interrupted):
        peaks, measured.interrupted = measure_peaks(
            [each.entry for each in measured.results],
            lambda each: peak_bytes(each, shapes, options.threads, options.time_limit),
        )
    return record(measured, setting, shapes, device, before, peaks, missing)


def _measure_training(options: argparse.Namespace) -> dict[str, Any]:
    rows = every_row(options.recipes)
    device, cpu = options.device, options.device.type == "cpu"
    torch.set_num_threads(options.threads)
    shape = options.layers, options.tokens
    timed, interrupted = time_rows(rows, *shape, device, options.rounds, say)
    peaks: dict[str, int | None] = {}
    if cpu and not interrupted:
        peaks, interrupted = measure_peaks(
            rows, lambda each: peak_of(each, *shape, options.threads, options.time_limit)
        )
    setting = {
        "command": command_line(options.arguments),
        "layers": options.layers,
        "tokens": options.tokens,
        "threads": options.threads,
        "rounds": len(timed[0].totals),
        "interrupted": interrupted,
    }
    ratio = bf16_product_ratio() if cpu else None
    return training_record(timed, setting, device, peaks, ratio)


def _chosen_entries(options: argparse.Namespace) -> tuple[list[Entry], dict[str, str], str]:
    """The entries, the baseline first; the libraries that are missing; the baseline's name."""
    if options.rules:
        return list(every_rule(options.backend)), {}, BASE
    peers = {name: PEERS[name] for name in options.against}
    known = {each.name: each for peer in PEERS.values() for each in peer.entries}
    recipes = ours(options.recipes, options.backend)
    known |= {each.name: each for each in recipes}
    if options.baseline not in known:
        raise ValueError(f"no entry {options.baseline!r}; known ones: {', '.join(known)}")
    found = [each for peer in peers.values() if peer.installed for each in peer.entries]
    missing = {name: peer.pip for name, peer in peers.items() if not peer.installed}
    missing |= {each.name: each.needs[1] for each in found if each.needs and not each.installed}
    found = [each for each in found if each.installed]
    baseline = known[options.baseline]
    # On another device it would not run with its library either.
    here = baseline.only_on in (None, options.device.type)
    if here and (package := _lacking(baseline)) is not None:
        raise ValueError(
            f"the baseline {baseline.name!r} needs {package}, which is not installed: pip install "
            f"-U {package}, or choose another --baseline"
        )
    more = in_ways((baseline, *recipes), options.ways)
    # Ours beside the baseline, so that a run that is interrupted has them.
    chosen = {each.name: each for each in (baseline, *recipes, *found, *more)}
    return [each.on_backend(options.backend) for each in chosen.values()], missing, baseline.name


def _lacking(entry: Entry) -> str | None:
    """The package that an entry needs, if it is not installed."""
    peer = next((each for each in PEERS.values() if entry in each.entries), None)
    if peer is not None and not peer.installed:
        return peer.pip
    return entry.needs[1] if entry.needs and not entry.installed else None


def _shapes(options: argparse.Namespace) -> Shapes:
    if options.model != _RANDOM:
        if options.parameters or options.tensors:
            raise ValueError(
                f"--parameters and --tensors are for --model {_RANDOM}; {options.model} has its own"
            )
        return MODELS[options.model]
    return random_shapes(options.parameters or _PARAMETERS, options.tensors or _TENSORS)


def _table(found: Mapping[str, Any]) -> str:
    return training_table(found) if found.get("kind") == "training" else table(found)


def _record(text: str) -> dict[str, Any]:
    try:
        found = json.loads(Path(text).read_text())
        kind, schema = found.get("kind", "bench"), found["schema"]
        if kind not in ("bench", "training") or schema != 1:
            raise ValueError(f"it is a record of {kind}, schema {schema}")
        _table(found)
        return found
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a record that bench --json has written ({error})"
        ) from None
