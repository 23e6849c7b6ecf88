"""One small GPT, trained again and again: only the storage of its numbers differs.

``convergence.py`` and ``learning_rate_sweep.py`` use it.
"""

from __future__ import annotations

import os
import shlex
import signal
import statistics
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import active_children, get_context, parent_process
from typing import Any

import torch
from gpt import GPT, GPTConfig, next_byte_loss
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

import torch_bf16
from torch_bf16 import Recipe
from torch_bf16.tools.compare.corpus import Corpus, batches
from torch_bf16.tools.compare.schedule import learning_rate_factor
from torch_bf16.tools.machine import machine
from torch_bf16.tools.output import date

REFERENCE = "fp32"
MIXED = "fp32, bf16 products"  # fp32 storage under bf16 autocast: the arithmetic of all others
VARIANTS = ("cautious", "update_clipping")
NUDGED = "fp32, one bit changed"  # the reference itself, from one weight that is the next number
CONTROL = "bf16 nearest"
# Plain bf16 training rounds vectors to nearest as well; here, as in all recipes, they stay exact.
TO_NEAREST = Recipe(
    CONTROL, weights="bf16_nearest", exp_avg="bf16_nearest", exp_avg_sq="bf16_nearest"
)


@dataclass(frozen=True)
class Run:
    """Everything that determines a run, except the storage of its numbers.

    Attributes:
        seed: seed of the initial weights and the batches.
        steps: number of steps.
        lr: peak learning rate.
        schedule: whether it warms up and decays; else it is constant.
        start: a state dict to start from instead of fresh weights.
        nudged: whether one initial weight is changed by its last bit, to see what chance does.
        optimizer: ``"AdamW"``; ``"cautious"`` or ``"update_clipping"`` for torch_bf16's AdamW with
            this option; or a class of the package schedulefree, which has no schedule.
    """

    seed: int
    steps: int
    lr: float
    schedule: bool = True
    start: dict[str, torch.Tensor] | None = None
    nudged: bool = False
    batch_size: int = 16
    context: int = 64
    width: int = 64
    layers: int = 2
    betas: tuple[float, float] = (0.9, 0.999)
    weight_decay: float = 0.1
    validation_batches: int = 128
    optimizer: str = "AdamW"


def train(run: Run, recipe: Recipe | str, corpus: Corpus) -> tuple[float, dict[str, torch.Tensor]]:
    """Train, and return the final validation loss in nats per byte, and the weights.

    Args:
        run: the run; two calls that differ only in ``recipe`` are a pair.
        recipe: how numbers are stored; ``REFERENCE`` is the optimizer of torch or of schedulefree
            in fp32 throughout, or ours over fp32 weights; ``MIXED`` the same under bf16 autocast.
        corpus: text for training and validation.
    """
    torch.manual_seed(run.seed)
    model = GPT(GPTConfig(context=run.context, width=run.width, layers=run.layers))
    if run.start is not None:
        model.load_state_dict(run.start)
    if run.nudged:
        with torch.no_grad():
            first = next(model.parameters()).view(-1)[:1]
            first.copy_(torch.nextafter(first, torch.full_like(first, torch.inf)))
    precision = (
        nullcontext if recipe == REFERENCE else partial(torch.autocast, "cpu", torch.bfloat16)
    )
    stored = replace(recipe, seed=run.seed) if isinstance(recipe, Recipe) else None
    if stored is not None and run.optimizer in VARIANTS:
        torch_bf16.cast_model(model, stored)
    optimizer = _optimizer(run, model, stored)
    if stored is not None and run.optimizer not in VARIANTS:
        torch_bf16.prepare(model, optimizer, stored)
    scheduled = run.optimizer in ("AdamW", *VARIANTS)
    switch: Any = model if scheduled else optimizer
    switch.train()
    shape = {"batch_size": run.batch_size, "context": run.context}
    for step, batch in enumerate(batches(corpus.train, n=run.steps, seed=run.seed + 1, **shape)):
        if run.schedule and scheduled:
            for group in optimizer.param_groups:
                group["lr"] = run.lr * learning_rate_factor(step, run.steps)
        with precision():
            loss = next_byte_loss(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    switch.eval()
    validation = batches(corpus.validation, n=run.validation_batches, seed=12345, **shape)
    with torch.no_grad(), precision():
        losses = [next_byte_loss(model, batch).item() for batch in validation]
    weights = {name: tensor.detach().float() for name, tensor in model.state_dict().items()}
    return statistics.fmean(losses), weights


def _optimizer(run: Run, model: GPT, stored: Recipe | None) -> torch.optim.Optimizer:
    options: dict[str, Any] = {"lr": run.lr, "weight_decay": run.weight_decay}
    if run.optimizer in VARIANTS:
        # Over fp32 weights every recipe keeps fp32 states.
        options |= {run.optimizer: True, "recipe": stored or "bf16-fp32-master"}
        return torch_bf16.AdamW(model.named_parameters(), betas=run.betas, **options)
    if run.optimizer == "AdamW":
        return torch.optim.AdamW(model.parameters(), betas=run.betas, **options)
    import schedulefree

    if run.optimizer != "SGDScheduleFree":
        options["betas"] = run.betas
    warm = run.steps // 20 if run.schedule else 0
    return getattr(schedulefree, run.optimizer)(model.parameters(), warmup_steps=warm, **options)


def final_loss(run: Run, recipe: Recipe | str, corpus: Corpus) -> float:
    """Return only the loss of :func:`train`: a tensor that a process returns keeps a file open."""
    return train(run, recipe, corpus)[0]


def run_all(jobs: Mapping[Any, Callable[[], Any]], workers: int, title: str) -> dict[Any, Any]:
    """Call each job in one of ``workers`` single-threaded processes; return results by key.

    What a job raises, and whatever ends this process, ends all others at once.

    Args:
        jobs: picklable calls by their keys.
        workers: number of processes; with 1, the jobs run in this one.
        title: title of the progress bar.
    """
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    results = {}
    with Progress(*columns) as progress:
        task = progress.add_task(title, total=len(jobs))
        for key, result in _run_here(jobs) if workers == 1 else _run_in_processes(jobs, workers):
            results[key] = result
            progress.advance(task)
    return {key: results[key] for key in jobs}


def _run_here(jobs: Mapping[Any, Callable[[], Any]]) -> Iterator[tuple[Any, Any]]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for key, call in jobs.items():
            yield key, call()
    finally:
        torch.set_num_threads(threads)


def _run_in_processes(
    jobs: Mapping[Any, Callable[[], Any]], workers: int
) -> Iterator[tuple[Any, Any]]:
    others = active_children()
    pool = ProcessPoolExecutor(workers, get_context("spawn"), _prepare_worker)
    try:
        futures = {pool.submit(call): key for key, call in jobs.items()}
        for future in as_completed(futures):
            yield futures[future], future.result()
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        # The pool would wait for the runs that are under way.
        for worker in active_children():
            if worker not in others:
                worker.terminate()
        raise
    pool.shutdown()


def _prepare_worker() -> None:
    torch.set_num_threads(1)
    # Ctrl-C reaches workers, too; the process that started them ends them.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def origin(program: str, arguments: list[str] | None) -> dict[str, Any]:
    """When, by which command and on what a study was made; None for the process's arguments."""
    given = sys.argv[1:] if arguments is None else arguments
    command = shlex.join(["python", f"examples/{program}", *given])
    return {"date": date(), "command": command, **machine(torch.device("cpu"))}
