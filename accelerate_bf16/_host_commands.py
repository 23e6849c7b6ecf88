"""The seam to Accelerate's command line and its launchers: questionnaire, files, notebooks, test.

``bf16_autoload`` calls :func:`on_import` right after each of these modules has been executed. The
functions here are module globals, so that one that was imported by name before us is replaced in
every module that holds it.
"""

from __future__ import annotations

import functools
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from .modes import MODES, canonical, canonical_or_refuse

__all__ = ["on_import"]

_VARIABLE = "ACCELERATE_MIXED_PRECISION"


def on_import(module: ModuleType) -> None:
    """Make the modes known to a module of Accelerate's commands or launchers.

    Args:
        module: one of the targets of ``bf16_autoload``; mutated, once.
    """
    for name, make in {
        "accelerate.commands.config.cluster": {"_ask_options": _asking},
        "accelerate.commands.config.sagemaker": {"_ask_options": _asking},
        "accelerate.commands.config.default": {"write_basic_config": _writing},
        "accelerate.commands.test": {"test_command": _testing},
        "accelerate.launchers": {"notebook_launcher": _launching},
    }[module.__name__].items():
        _replace(module, name, make)


def _replace(module: ModuleType, name: str, make: Callable[[Any, Any], Any]) -> None:
    original = getattr(module, name)
    if hasattr(original, "_before_bf16"):
        return
    replacement: Any = functools.wraps(original)(make(original, module))
    replacement._before_bf16 = original
    if name == "_ask_options":  # the questions of one module, not of all
        setattr(module, name, replacement)
        return
    for holder in list(sys.modules.values()):
        if isinstance(holder, ModuleType) and vars(holder).get(name) is original:
            setattr(holder, name, replacement)


def _asking(original: Any, module: Any) -> Any:
    def _ask_options(
        input_text: str, options: Any = (), convert_value: Any = None, default: int = 0
    ) -> Any:
        if convert_value is not module._convert_mixed_precision:
            return original(input_text, options, convert_value, default)
        n = len(options)

        def convert(index: Any) -> Any:
            from accelerate.utils import PrecisionType

            chosen = int(index)
            return convert_value(index) if chosen < n else PrecisionType(MODES[chosen - n])

        return original(input_text, [*options, *MODES], convert, default)

    return _ask_options


def _writing(original: Any, module: Any) -> Any:
    def write_basic_config(mixed_precision: Any = "no", *args: Any, **kwargs: Any) -> Any:
        mode = canonical(mixed_precision)
        path = original("no" if mode else mixed_precision, *args, **kwargs)
        if mode and path:
            config = json.loads(Path(path).read_text(encoding="utf-8"))
            config["mixed_precision"] = mode
            # As Accelerate writes it itself.
            text = json.dumps(config, indent=2, sort_keys=True) + "\n"
            Path(path).write_text(text, encoding="utf-8")
        return path

    return write_basic_config


def _testing(original: Any, module: Any) -> Any:
    """Accelerate's own test compares fp32 weights under SGD, which no bf16 mode can pass."""

    def test_command(args: Any) -> Any:
        if _mode_of_file(args.config_file) is None:
            return original(args)
        with _set(module, "path_in_accelerate_package", lambda *_: _selftest()):
            return original(args)

    return test_command


def _mode_of_file(config_file: str | None) -> str | None:
    from accelerate.commands.config import config_args

    path = config_file or config_args.default_config_file
    if not os.path.isfile(path):
        return None
    return canonical(config_args.load_config_from_file(path).mixed_precision)


def _selftest() -> Path:
    return Path(__file__).with_name("selftest.py")


def _launching(original: Any, module: Any) -> Any:
    def notebook_launcher(
        function: Any,
        args: Any = (),
        num_processes: int | None = None,
        mixed_precision: Any = "no",
        *rest: Any,
        **kwargs: Any,
    ) -> Any:
        # Accelerate exports the mode under a name that nothing reads.
        mode = canonical_or_refuse(str(mixed_precision), "mixed_precision")
        with _environment(mode):
            return original(function, args, num_processes, mixed_precision, *rest, **kwargs)

    return notebook_launcher


@contextmanager
def _environment(mode: str | None) -> Iterator[None]:
    before = os.environ.get(_VARIABLE)
    if mode:
        os.environ[_VARIABLE] = mode
    try:
        yield
    finally:
        if mode and before is None:
            os.environ.pop(_VARIABLE, None)
        elif mode and before is not None:
            os.environ[_VARIABLE] = before


@contextmanager
def _set(module: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, before)
