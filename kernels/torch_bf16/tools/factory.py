"""Load what a user names as ``module:factory``: a model, possibly with batches and an optimizer."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from torch_bf16.errors import described, with_article

__all__ = [
    "CONTRACT",
    "Training",
    "backward",
    "class_and_options",
    "import_name",
    "is_factory",
    "loss_of",
    "training_of",
]

CONTRACT = (
    "a function without arguments that returns (model, batches) or (model, batches, optimizer), "
    "where model(batch), model(*batch) or model(**batch) returns the loss"
)


@dataclass(frozen=True)
class Training:
    """What a factory returned.

    Attributes:
        model: in fp32, as a user trains it.
        batches: iterated over again and again; a mapping is passed as keyword arguments, a tuple or
            a list as positional ones, anything else as the only argument.
        optimizer: over the model's parameters; None if the factory leaves it to the command.
        source: the factory's name as the user wrote it.
    """

    model: nn.Module
    batches: Iterable[Any]
    optimizer: torch.optim.Optimizer | None
    source: str

    def cycle_batches(self) -> Iterator[Any]:
        """Yield one batch after the other, starting over after the last one.

        Raises:
            ValueError: there are no batches, they were an iterator, which has ended, or the next
                one could not be made.
        """
        taken = 0
        while True:
            before = taken
            for batch in self._pass():
                taken += 1
                yield batch
            if taken == before:
                end = f"ended after {taken} batches: return a list or a DataLoader, not an iterator"
                raise ValueError(f"{self.source}: the batches {end if taken else 'are empty'}")

    def _pass(self) -> Iterator[Any]:
        try:
            yield from self.batches
        # A user's code may raise anything.
        except Exception as error:
            raise ValueError(f"{self.source}: no next batch: {described(error)}") from error


def is_factory(text: str) -> bool:
    """Whether an argument has the form of ``module:factory`` or ``file.py:factory``."""
    module, colon, name = text.rpartition(":")
    whole = module.endswith(".py") or (os.sep not in module and not module.endswith(".json"))
    return bool(colon and module and name and whole)


def import_name(text: str) -> Any:
    """Import what ``module:name`` or ``file.py:name`` stands for, found from the current folder.

    What a file imports is looked for beside it first, as if it were run.

    Args:
        text: the reference, whose name may have dots.

    Raises:
        ImportError, ValueError: there is no such object; the message says why.
    """
    module, _, names = text.rpartition(":")
    folder = os.getcwd()
    places = [str(Path(module).resolve().parent), folder] if module.endswith(".py") else [folder]
    sys.path[:0] = places
    try:
        found: Any = _import(module)
        for name in names.split("."):
            found = getattr(found, name)
    except ImportError as error:
        raise ImportError(f"{text!r} cannot be imported from {folder}: {error}") from error
    except AttributeError as error:
        raise ValueError(f"{text!r} names nothing: {error}") from error
    finally:
        for each in places:
            # The code may have changed the path, too.
            with suppress(ValueError):
                sys.path.remove(each)
    return found


def class_and_options(text: str) -> tuple[str, dict[str, Any]]:
    """Split a reference to a class into its name, as written, and the options in brackets.

    Args:
        text: ``Name``, ``module.Name`` or ``module:Name``, or one of these with ``(option=value)``.

    Raises:
        ValueError: the text does not have this form, or options are not plain values.

    Example:
        >>> class_and_options("torch.optim.SGD(momentum=0.9)")
        ('torch.optim.SGD', {'momentum': 0.9})
    """
    match = re.fullmatch(r"([\w.:]+)(\(.*\))?", text.strip(), re.S)
    if not match:
        raise ValueError(
            f"{text!r} is not an optimizer such as AdamW, torch.optim.AdamW or 'SGD(momentum=0.9)'"
        )
    try:
        call: Any = ast.parse(f"f{match[2] or '()'}", mode="eval").body
        if call.args or any(each.arg is None for each in call.keywords):
            raise ValueError("each needs a name, as in momentum=0.9")
        return match[1], {each.arg: ast.literal_eval(each.value) for each in call.keywords}
    except (SyntaxError, ValueError, AttributeError) as error:
        raise ValueError(f"options of {text!r} are not plain values: {error}") from None


def training_of(text: str) -> Training:
    """Call a factory of :data:`CONTRACT`.

    Args:
        text: ``module:factory`` or ``file.py:factory``.

    Raises:
        ImportError, ValueError: there is no such factory, it failed, or it returned something else.
    """
    factory = import_name(text)
    if not callable(factory) or isinstance(factory, nn.Module):
        raise ValueError(f"{text!r} is {with_article(factory)}, and must be {CONTRACT}")
    try:
        returned: Any = factory()
    # A user's code may raise anything, and a script's main function may end the process.
    except (Exception, SystemExit) as error:
        raise ValueError(f"{text}() failed: {described(error)}. It must be {CONTRACT}") from error
    is_sequence = isinstance(returned, (tuple, list))
    if not is_sequence or len(returned) not in (2, 3):
        found = f"{len(returned)} things" if is_sequence else type(returned).__name__
        raise ValueError(f"{text}() returned {found}; it must be {CONTRACT}")
    model, batches, optimizer = (*returned, None)[:3]
    if not isinstance(model, nn.Module):
        raise ValueError(f"{text}() returned {with_article(model)} as the model, its first item")
    if not any(p.requires_grad for p in model.parameters()):
        raise ValueError(f"{text}() returned a model without trainable parameters")
    if not isinstance(batches, Iterable) or isinstance(batches, (str, Mapping, Tensor)):
        raise ValueError(
            f"{text}() returned {with_article(batches)} as the batches, which must be a list, a "
            "DataLoader or another iterable of them"
        )
    if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
        raise ValueError(f"{text}() returned {with_article(optimizer)} as the optimizer")
    return Training(model, batches, optimizer, text)


def loss_of(model: nn.Module, batch: Any) -> Tensor:
    """The loss of a batch: what the model returns, or that output's ``loss``.

    Raises:
        ValueError: the model cannot take the batch, or returns no loss.
    """
    try:
        if isinstance(batch, Mapping):
            found: Any = model(**batch)
        else:
            found = model(*batch) if isinstance(batch, (tuple, list)) else model(batch)
    # A user's code may raise anything.
    except Exception as error:
        raise ValueError(f"{type(model).__name__} failed on a batch: {described(error)}") from error
    loss = found.get("loss") if isinstance(found, Mapping) else getattr(found, "loss", found)
    loss = loss[0] if isinstance(loss, tuple) and loss else loss
    if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
        what = f"of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else "and no loss"
        if isinstance(loss, Tensor) and loss.numel() == 1:
            what = "that depends on no trainable parameter"
        raise ValueError(
            f"{type(model).__name__} returned {with_article(found)} {what}; model(batch), "
            "model(*batch) or model(**batch) must return one number to minimise, or an output with "
            "that number as its loss"
        )
    return loss.float().reshape(())


def backward(model: nn.Module, loss: Tensor) -> None:
    """Compute the gradients of a loss.

    Raises:
        ValueError: the model's backward pass fails.
    """
    try:
        loss.backward()
    # A user's code may raise anything.
    except Exception as error:
        raise ValueError(
            f"{type(model).__name__} failed in backward(): {described(error)}"
        ) from error


def _import(module: str) -> Any:
    try:
        if module.endswith(".py"):
            return _import_file(Path(module))
        return importlib.import_module(module)
    except ImportError:
        raise
    # A user's code may raise anything, and a script without a main guard may end the process.
    except (Exception, SystemExit) as error:
        raise ImportError(f"{module} raised {error!r}") from error


def _import_file(path: Path) -> Any:
    if not path.is_file():
        raise ImportError(f"there is no file {path}")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module
