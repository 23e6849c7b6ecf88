"""``python -m torch_bf16 recommend``: its options, and what it does with them."""

from __future__ import annotations

import argparse
import math
import shlex
from collections.abc import Callable
from functools import partial
from pathlib import Path

from torch_bf16.foreign.capabilities import check_steps_on_copies
from torch_bf16.foreign.convertible import fused_class
from torch_bf16.optim.optimizer import BF16Optimizer
from torch_bf16.recipe import get_recipe
from torch_bf16.tools.arguments import add_json_argument, count, keep_inputs, positive_number
from torch_bf16.tools.output import exit_status, progress_line, publish

from .host import planned_rates
from .observation import Observation
from .report import record, show
from .runs import KINDS, observe
from .sizes import sizes
from .verdict import judge

__all__ = ["add_recommend_arguments", "recommend"]

_TOTAL_STEPS = 1000


def add_recommend_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("training", metavar="SCRIPT-OR-FACTORY", help=KINDS)
    parser.add_argument(
        *("--steps", "-n"),
        type=count,
        default=20,
        metavar="N",
        help="steps to take; the second half is observed (default: %(default)s)",
    )
    parser.add_argument(
        "--total-steps",
        type=count,
        metavar="N",
        help=f"steps of the whole run (default: what the host says, else {_TOTAL_STEPS})",
    )
    parser.add_argument(
        "--lr",
        type=positive_number,
        help="AdamW's learning rate, if a factory returns no optimizer",
    )
    parser.add_argument(
        "--most", type=count, default=12, metavar="N", help="layers to list (default: %(default)s)"
    )
    parser.epilog = "Arguments after -- are the script's: recommend train.py -- --lr 1e-4"
    add_json_argument(parser)


def recommend(options: argparse.Namespace) -> int:
    """Say which recipe loses nothing.

    Args:
        options: the parsed options; ``arguments`` are the script's.

    Returns:
        The exit status: 0 if a recipe was recommended.

    Raises:
        ValueError, OSError, ImportError: there is no such training, or it cannot be measured.
    """
    text, asked = options.training, options.total_steps
    keep_inputs(options.json, text)
    if asked is not None and asked < options.steps:
        raise ValueError(
            f"--total-steps {asked} is less than --steps {options.steps}: the steps that are taken "
            f"are the first ones of the whole run. Give --steps {asked} or fewer"
        )

    def finish(concluded: Callable[[], Observation]) -> int:
        return exit_status("recommend", lambda: _report(options, concluded()))

    with progress_line() as progress:
        found = observe(text, options.arguments, options.steps, options.lr, progress, finish)
    return _report(options, found)


def _report(options: argparse.Namespace, found: Observation) -> int:
    """Say what follows from what was observed, and return the exit status."""
    text = options.training
    _check(found)
    notes = _plan(found, options.total_steps)
    shapes, held, note = sizes(found)
    verdict = judge([*found.parameters.values()], {name: each.held for name, each in held.items()})
    # A factory is not a program.
    command = shlex.join(["python", text, *options.arguments]) if Path(text).exists() else text
    notes += [note] if note else []
    content = record(command, found, verdict, shapes, held, notes)
    publish(content, options.json, partial(show, most=options.most))
    return 0


def _check(found: Observation) -> None:
    """Refuse a training that no recipe can train, or that cannot be judged."""
    for optimizer in found.optimizers:
        if isinstance(optimizer, BF16Optimizer):
            continue
        try:
            if fused_class(optimizer, get_recipe("bf16-stochastic")) is None:
                check_steps_on_copies(optimizer)
        except (ValueError, NotImplementedError) as error:
            raise ValueError(f"no recipe trains with this optimizer: {error}") from error
    if not found.parameters and found.unseen:
        raise ValueError(
            f"the updates by {type(found.optimizers[0]).__name__} of {len(found.unseen)} weights "
            "are not known before they are stored; train fp32 weights with torch's own class"
        )
    if not found.observed_steps and found.converted:
        raise ValueError(
            f"{', '.join(found.converted)} steps over bf16 weights and was converted at its first "
            "step; none of the steps after it was observed: give --steps 2 or more"
        )
    if not found.parameters and found.infinite:
        raise ValueError(
            f"the gradients of all {found.infinite} steps that were observed hold NaN or "
            "infinities; no format of weights can help"
        )


def _plan(found: Observation, asked: int | None) -> list[str]:
    """Follow the schedule to its end, set each parameter's length of the run, and return notes."""
    total = asked or found.host.steps or _TOTAL_STEPS
    notes = []
    if asked is None and found.host.steps is None:
        notes.append(
            f"the run is assumed to take {total:,} steps: what is lost depends on their number, so "
            "give it as --total-steps"
        )
    total = max(total, max(found.steps))
    for number, optimizer in enumerate(found.optimizers):
        schedulers = found.schedulers[number]
        rates, why = planned_rates(optimizer, schedulers, found.rates[number], total)
        if why is not None and len(rates) > found.steps[number]:
            notes.append(f"the last learning rate is assumed for the rest of the run: {why}")
        # One length per group; a group added after the first steps has that of the last one.
        columns = zip(*rates, strict=False)
        lengths = [float(total) if math.isnan(c[0]) else sum(map(abs, c)) for c in columns]
        for each in found.parameters.values():
            if each.rate[0] == number:
                each.length = lengths[min(each.rate[1], len(lengths) - 1)]
        found.rates[number] = rates
    return list(dict.fromkeys(notes))
