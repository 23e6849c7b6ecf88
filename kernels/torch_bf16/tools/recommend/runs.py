"""Take some steps of a user's training: of a factory's, or of a script that runs as it is."""

from __future__ import annotations

import contextlib
import os
import runpy
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch

from torch_bf16.errors import described, with_article
from torch_bf16.parameters import parameters_of
from torch_bf16.tools.factory import CONTRACT, Training, backward, is_factory, loss_of, training_of
from torch_bf16.tools.output import to_standard_error

from .observation import Observation, Observer

__all__ = ["KINDS", "observe"]

KINDS = f"a script, or module:factory: {CONTRACT}"
# Experiment trackers that would open a run for a training of a few steps.
_QUIET = {"WANDB_MODE": "disabled", "COMET_MODE": "disabled"}


def observe(
    text: str,
    arguments: Sequence[str],
    steps: int,
    lr: float | None,
    progress: Callable[[str], None],
    finish: Callable[[Callable[[], Observation]], int] = lambda concluded: 1,
) -> Observation:
    """Take some steps of a training and observe them.

    Args:
        text: one of :data:`KINDS`.
        arguments: the script's arguments.
        steps: how many steps to take.
        lr: the learning rate of AdamW, for a factory that returns no optimizer.
        progress: called with a line of text after each step.
        finish: does the rest of the command's work and returns its exit status, in a process that
            ends there: a script that catches all that is raised ends by nothing else. It is given
            what returns the observation or raises the error.

    Raises:
        ValueError, OSError, ImportError: there is no such training, or it cannot be measured; the
            message says why.
    """
    if int(os.environ.get("WORLD_SIZE") or 1) > 1:
        raise ValueError(
            "this is one of several ranks (WORLD_SIZE); start it as one process, without torchrun "
            "or accelerate launch: rounding is the same on each rank"
        )
    path = Path(text)
    if not path.exists() and is_factory(text):
        if arguments:
            raise ValueError(f"arguments after -- are for scripts, and {text} is a factory")
        return _of_factory(training_of(text), steps, lr, progress)
    if not path.exists():
        raise ValueError(f"{text!r} is not a file here. It must be {KINDS}")
    if path.is_dir():
        raise ValueError(f"{path} is a folder. It must be {KINDS}")
    if lr is not None:
        raise ValueError("--lr is for factories without an optimizer; a script has its own")
    return _of_script(path, arguments, steps, progress, finish)


def _of_factory(
    training: Training, steps: int, lr: float | None, progress: Callable[[str], None]
) -> Observation:
    model, optimizer, text = training.model, training.optimizer, training.source
    trained = [p for p in model.parameters() if p.requires_grad]
    if optimizer is None:
        if lr is None:
            raise ValueError(
                f"{text}() returned no optimizer: give --lr, the learning rate of AdamW, or return "
                "(model, batches, optimizer)"
            )
        optimizer = torch.optim.AdamW(trained, lr=lr)
    elif lr is not None:
        raise ValueError(f"--lr {lr:g}: {text}() returned an optimizer, which has its own")
    trained_ids = {id(p) for p in trained}
    if trained_ids.isdisjoint(map(id, parameters_of(optimizer))):
        raise ValueError(
            f"{text}() returned {with_article(optimizer)} that has none of the model's "
            "trainable parameters"
        )
    model.train()
    with Observer(steps, progress) as observer:
        for step, batch in enumerate(training.cycle_batches(), 1):
            loss = loss_of(model, batch)
            if not bool(loss.isfinite()):
                value = float(loss.detach())
                raise ValueError(
                    f"{text}: the loss of step {step} is {value}; no format of weights can help"
                )
            optimizer.zero_grad()
            backward(model, loss)
            try:
                optimizer.step()
            # A user's optimizer may raise anything.
            except Exception as error:
                raise ValueError(
                    f"{text}: {type(optimizer).__name__} took no step: {described(error)}. "
                    f"It must work with step() after backward()"
                ) from error
            # Without an end, nothing would be observed.
            if not observer.found.optimizers:
                raise ValueError(
                    f"{text}: torch's hooks do not see the steps of {type(optimizer).__name__}, as "
                    "if its __init__ did not call super().__init__(), so nothing can be measured"
                )
    return observer.found


def _of_script(
    path: Path,
    arguments: Sequence[str],
    steps: int,
    progress: Callable[[str], None],
    finish: Callable[[Callable[[], Observation]], int],
) -> Observation:
    ended = "ended"
    program = contextlib.ExitStack()

    def leave(concluded: Callable[[], Observation]) -> None:
        # With the streams that the command has beside its script.
        program.close()
        status = 1
        try:
            status = finish(concluded)
        # The script would catch it.
        except BaseException:
            traceback.print_exc()
        os._exit(status)

    with Observer(steps, progress, leave) as observer, program:
        program.enter_context(_as_program(path, arguments))
        try:
            runpy.run_path(str(path), run_name="__main__")
        except SystemExit as error:
            if error.code:
                ended = f"exited with status {error.code} (its own arguments go after --)"
        # A user's code may raise anything.
        except Exception as error:
            taken = max(observer.found.steps, default=0)
            raise ValueError(
                f"{path} failed after {taken} steps, {_where(error, path)}: {described(error)}"
            ) from error
    taken = max(observer.found.steps, default=0)
    # The script may end after fewer steps than were asked for.
    if observer.found.observed_steps or taken >= steps:
        return observer.found
    what = f"after {taken} of {steps} steps" if taken else "without a step of any optimizer"
    advice = " Give a smaller --steps" if taken > 1 else ""
    raise ValueError(
        f"{path} {ended} {what}, so nothing was measured; it must train with an optimizer of "
        f"torch.optim or another subclass of torch.optim.Optimizer.{advice}"
    )


@contextlib.contextmanager
def _as_program(path: Path, arguments: Sequence[str]) -> Iterator[None]:
    """Arguments and import path as if the script were started alone; its output goes to stderr."""
    argv, place = sys.argv, str(path.resolve().parent)
    added = {name: value for name, value in _QUIET.items() if name not in os.environ}
    os.environ.update(added)
    sys.argv = [str(path), *arguments]
    sys.path.insert(0, place)
    try:
        with to_standard_error():
            yield
    finally:
        sys.argv = argv
        with contextlib.suppress(ValueError):
            sys.path.remove(place)
        for name in added:
            os.environ.pop(name, None)


def _where(error: BaseException, path: Path) -> str:
    """The last line of the script itself in an error's traceback."""
    script = str(path.resolve())
    lines = [
        each.lineno
        for each in traceback.extract_tb(error.__traceback__)
        if str(Path(each.filename).resolve()) == script
    ]
    if lines:
        return f"in its line {lines[-1]}"
    return f"line {error.lineno}" if isinstance(error, SyntaxError) else "before its first line"
