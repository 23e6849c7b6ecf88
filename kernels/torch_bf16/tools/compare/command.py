"""``python -m torch_bf16 compare``: its options, and what it does with them."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from torch_bf16.errors import described, first_line
from torch_bf16.tools.arguments import (
    add_json_argument,
    count,
    file_to_write,
    keep_apart,
    keep_inputs,
    picture_to_write,
    positive_number,
    refuse,
)
from torch_bf16.tools.factory import CONTRACT, is_factory
from torch_bf16.tools.machine import hardware, versions
from torch_bf16.tools.output import command_line, date, number, publish, say, write_json, write_text

from .analysis import analyse
from .figure import draw
from .logs import KINDS
from .page import page
from .reading import runs_of
from .report import show
from .rows import DEFAULT, KNOWN, Row, also_argument, choice_of, row_of
from .sessions import train_all
from .store import Store, file_stem
from .subject import subject_of
from .training import Plan, Run
from .verdict import HIGHER, LOWER, judge

__all__ = ["add_compare_arguments", "compare"]

_RECORD = "compare.json"
_LR, _OPTIMIZER, _STEPS, _SEEDS = 1e-3, "torch.optim.AdamW", 300, 3
_ONLY_TRAINED = (
    *("precisions", "also", "optimizer", "lr", "schedule", "steps", "seeds", "device", "text"),
    "fresh",
)


def add_compare_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument(
        "what",
        nargs="*",
        metavar="WHAT",
        help=f"module:factory or file.py:factory, {CONTRACT}; or two runs or more, [NAME=]PATH, "
        f"each {KINDS}; or {_RECORD}, to draw it again; or nothing, for a small built-in model",
    )
    training = parser.add_argument_group("training")
    training.add_argument(
        "--precisions", metavar="A,B", help=f"{KNOWN} (default: {','.join(DEFAULT)})"
    )
    training.add_argument(
        "--also",
        action="append",
        metavar="NAME=module:Class(...)",
        help="a row of bf16 weights with another optimizer; may be given again",
    )
    training.add_argument(
        "--optimizer",
        metavar="[module.]Class(...)",
        help=f"the optimizer of all other rows (default: {_OPTIMIZER})",
    )
    training.add_argument("--lr", type=positive_number, help=f"peak learning rate (default: {_LR})")
    training.add_argument(
        "--schedule",
        choices=("cosine", "constant"),
        help="short warm-up and half a cosine, or none (default: cosine)",
    )
    training.add_argument(
        "--steps", type=count, metavar="N", help=f"steps of each run (default: {_STEPS})"
    )
    training.add_argument(
        "--seeds", type=count, metavar="N", help=f"pairs of runs (default: {_SEEDS})"
    )
    training.add_argument(
        "--device", help="the device to train on (default: cuda if torch sees a GPU, else cpu)"
    )
    training.add_argument(
        "--text", type=Path, metavar="FILE", help="a text to train the built-in model on"
    )
    training.add_argument("--fresh", action="store_true", help="delete the runs in --out first")
    parser.add_argument(
        "--reference", metavar="NAME", help="the row to compare with (default: the first)"
    )
    parser.add_argument(
        "--metric", metavar="NAME", help="metric of existing runs (default: their loss)"
    )
    parser.add_argument(
        "--better",
        choices=(LOWER, HIGHER),
        help=f"which values of --metric are better (default: {LOWER}, if the reference's fall)",
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("compare"),
        metavar="FOLDER",
        help=f"runs, {_RECORD} and compare.html (default: compare); the same command resumes there",
    )
    parser.add_argument(
        "--html", type=file_to_write, metavar="FILE", help="write the page to FILE instead"
    )
    parser.add_argument(
        "--plot", type=picture_to_write, metavar="FILE", help="draw the charts to FILE"
    )
    add_json_argument(parser)


def compare(options: argparse.Namespace) -> int:
    """Compare precisions, or existing runs.

    Returns:
        The exit status: 0 if nothing is lost, 1 if a row stalls, is broken or loses.

    Raises:
        ValueError, OSError, ImportError: an argument cannot be used; the message says why.
    """
    files = [*options.what, *(each.partition("=")[2] for each in options.what), options.text]
    for output in (options.html, options.plot, options.json):
        keep_inputs(output, *files)
    record = _record_path(options.what)
    page_file = options.html or (options.out / "compare.html" if record is None else None)
    shown = {"--plot": options.plot, "--html" if options.html else "the page": page_file}
    keep_apart({"--json": options.json, **shown})
    # The record is the same as what --json writes.
    keep_apart({"the record": options.out / _RECORD if record is None else None, **shown})
    if record is not None:
        names = (*_ONLY_TRAINED, "reference", "metric", "better")
        refuse(options, names, f"{record} is a record, and is only shown again")
        found = _load(record)
    elif not options.what or _one_factory(options.what):
        found = _train(options)
    else:
        refuse(options, _ONLY_TRAINED, "runs that exist are read and nothing is trained")
        rows, metric = runs_of(options.what, options.metric)
        reference = _reference(options.reference, [*rows])
        about = {"what": "runs that exist", "measure": metric, "runs": sorted(options.what)}
        _keep_other_record(options.out, about)
        found = _analyse(rows, reference, about, options.better or LOWER)
        _check_direction(found, options)
        found["environment"] = {}
    if record is None:
        found["command"] = command_line(options.arguments)
        found["date"] = date()
    _write(found, options, page_file, keep=record is None)
    return 0 if found["healthy"] else 1


def _train(options: argparse.Namespace) -> dict[str, Any]:
    factory = options.what[0] if options.what else None
    if factory and options.text:
        raise ValueError(f"--text is for the built-in model, and {factory} has batches of its own")
    if options.metric or options.better:
        name = "--metric" if options.metric else "--better"
        raise ValueError(f"{name} is for runs that exist; a model is compared by its own loss")
    rows = _rows(options)
    if len(rows) < 2:
        found = f"one row, {rows[0].name}" if rows else "no row"
        raise ValueError(f"there is {found}, and nothing to compare: --precisions A,B names two")
    reference = _reference(options.reference, [row.name for row in rows])
    choice = choice_of(options.optimizer or _OPTIMIZER)
    if options.lr and "lr" in choice.options:
        raise ValueError(f"--lr {options.lr:g} and {choice.text} are two learning rates: give one")
    plan = Plan(
        subject_of(factory, options.text),
        choice,
        options.lr or choice.options.get("lr", _LR),
        options.steps or _STEPS,
        options.schedule or "cosine",
        _device(options.device),
    )
    has_optimizer = bool(factory) and plan.subject.make(plan.steps).optimizer is not None
    if has_optimizer and (options.lr or options.optimizer):
        raise ValueError(
            f"{factory}() returns an optimizer of its own, so --lr and --optimizer would have no "
            "effect: leave them out, or return (model, batches)"
        )
    about = {"what": plan.subject.name, "measure": "training loss"}
    if not options.fresh:
        _keep_other_record(options.out, about)
    seeds = options.seeds or _SEEDS
    with Store(options.out, plan) as store:
        if options.fresh:
            store.clear(rows, seeds)
        runs = train_all(plan, rows, seeds, store)
    found = _analyse(runs, reference, about)
    for row, result in zip(rows, found["rows"], strict=True):
        result["described"] = row.description
    found["settings"] = {
        **{"steps": plan.steps, "seeds": seeds, "schedule": plan.schedule},
        **({} if has_optimizer else {"lr": plan.lr, "optimizer": plan.optimizer.text}),
    }
    found["environment"] = {
        **hardware(plan.device),
        **{"threads": torch.get_num_threads(), "device used": str(plan.device)},
        **{name: version for name, version in versions().items() if version},
    }
    return found


def _analyse(
    rows: Mapping[str, Sequence[Run]], reference: str, about: Mapping[str, Any], better: str = LOWER
) -> dict[str, Any]:
    found = {"schema": 1, "kind": "compare", **about, **analyse(rows, reference, better)}
    judge(found)
    found["notes"] = _notes(found, rows)
    return found


def _check_direction(found: Mapping[str, Any], options: argparse.Namespace) -> None:
    """Refuse to take a metric for a loss that does not fall as one."""
    fall = found["improvement"]
    if options.metric and not options.better and fall is not None and fall <= 0:
        how = "does not change" if fall == 0 else f"rises by {number(-fall)}"
        raise ValueError(
            f"{options.metric} of {found['reference']} {how}, so that it may be no loss: say which "
            f"values are better, --better {HIGHER} or --better {LOWER}"
        )


def _notes(found: Mapping[str, Any], rows: Mapping[str, Sequence[Run]]) -> list[str]:
    notes = []
    if found["shortened"]:
        shared = f"{found['first_step']:,} to {found['last_step']:,}"
        notes.append(
            f"not all runs have the same steps: compared over those that all have, {shared}; there "
            f"are more in {', '.join(found['shortened'])}"
        )
    counts = {name: len(runs) for name, runs in rows.items()}
    if len(set(counts.values())) > 1:
        each = ", ".join(f"{name} {count}" for name, count in counts.items())
        notes.append(f"rows have different numbers of runs ({each}): pairs are made in their order")
    if hidden := [row["name"] for row in found["rows"] if row["undecoded"]]:
        notes.append(
            f"{', '.join(hidden)}: what the optimizer keeps beyond a bf16 weight cannot be read "
            "here, so what was kept, and what never moved, are figures of the bf16 weights alone"
        )
    for row in found["rows"]:
        if row["unmeasured"]:
            notes.append(f"{row['name']}: updates are not measured: {row['unmeasured']}")
    return notes


def _rows(options: argparse.Namespace) -> list[Row]:
    names = [each.strip() for each in (options.precisions or ",".join(DEFAULT)).split(",")]
    rows = [row_of(name) for name in names if name]
    rows += [also_argument(text) for text in options.also or ()]
    if twice := {row.name for row in rows if [r.name for r in rows].count(row.name) > 1}:
        raise ValueError(f"two rows have the name {', '.join(sorted(twice))}")
    files: dict[str, str] = {}
    for row in rows:
        # Some file systems do not tell capitals from small letters.
        other = files.setdefault(file_stem(row).lower(), row.name)
        if other != row.name:
            raise ValueError(
                f"rows {other!r} and {row.name!r} would be kept in files of one name: give one of "
                "them a name that differs by a letter or a digit"
            )
    return rows


def _write(
    found: Mapping[str, Any], options: argparse.Namespace, page_file: Path | None, keep: bool
) -> None:
    if keep:
        options.out.mkdir(parents=True, exist_ok=True)
        write_json(found, options.out / _RECORD)
    if page_file is not None:
        page_file.parent.mkdir(parents=True, exist_ok=True)
        write_text(page_file, page(found))
    if options.plot is not None:
        draw(found, options.plot)
    publish(found, options.json, show)
    if page_file is not None:
        say(f"page: {page_file.resolve()}")


def _keep_other_record(folder: Path, about: Mapping[str, Any]) -> None:
    """Refuse to replace the record of another comparison; one with more runs may."""
    path = folder / _RECORD
    if not path.is_file():
        return
    before = _load(path, shown=False)
    same = before["what"] == about["what"] and before.get("measure") == about["measure"]
    if not same or not {*before.get("runs", ())} <= {*about.get("runs", ())}:
        raise ValueError(
            f"{path} compares {_described(before)}, and would be replaced by a comparison of "
            f"{_described(about)}: give another --out FOLDER"
        )


def _described(about: Mapping[str, Any]) -> str:
    if runs := about.get("runs"):
        return f"{about['measure']} of {', '.join(runs)}"
    return about["what"]


def _record_path(words: Sequence[str]) -> Path | None:
    if len(words) != 1:
        return None
    path = Path(words[0])
    if path.is_dir() and (path / _RECORD).exists():
        return path / _RECORD
    ours = path.suffix == ".json" and path.name != "trainer_state.json"
    return path if path.is_file() and ours else None


def _load(path: Path, shown: bool = True) -> dict[str, Any]:
    try:
        found = json.loads(path.read_bytes())
        if (found["kind"], found["schema"]) != ("compare", 1):
            raise ValueError("it is of another kind or version")
        if not isinstance(found["healthy"], bool):
            raise ValueError("it has no verdict")
        # Records from before there was another direction.
        found.setdefault("better", LOWER)
        if shown:
            page(found)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(
            f"{path} is not a record of this version of compare: {described(error)}"
        ) from None
    return found


def _one_factory(words: Sequence[str]) -> bool:
    return len(words) == 1 and is_factory(words[0]) and not Path(words[0]).exists()


def _device(name: str | None) -> torch.device:
    try:
        device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
        torch.zeros(1, device=device).item()
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"--device {name} cannot be used here: {first_line(error)}") from None
    return device


def _reference(asked: str | None, names: Sequence[str]) -> str:
    reference = asked or names[0]
    if reference not in names:
        raise ValueError(f"--reference {reference!r} is not a row; those: {', '.join(names)}")
    return reference
