"""Accelerate's command line and its launchers: parsers, questionnaire, files, test, notebooks."""

from __future__ import annotations

import argparse
import json
import os
import re
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from accelerate_bf16.modes import (
    LAUNCHER_VARIABLE,
    MODE_VARIABLE,
    MODES,
    canonical,
    canonical_or_refuse,
)
from bf16_autoload import Patches

__all__ = [
    "add_argument",
    "ask_options",
    "explain_choices",
    "export_mode",
    "export_mode_to_sagemaker",
    "notebook_launcher",
    "test_command",
    "write_basic_config",
]


def add_argument(original: Any) -> Any:
    """Add the modes to the choices of ``--mixed_precision``."""

    def add_argument(self: Any, *args: Any, **kwargs: Any) -> Any:
        if "--mixed_precision" in args and "bf16" in (kwargs.get("choices") or ()):
            ours = (name for name in MODES if name not in kwargs["choices"])
            kwargs["choices"] = [*kwargs["choices"], *ours]
        return original(self, *args, **kwargs)

    return add_argument


def explain_choices(module: Any, patches: Patches) -> None:
    """Let parsers whose choices are only Accelerate's own explain how to set a mode."""
    patches.replace(argparse, "ArgumentParser.error", _explain_choice)


def _explain_choice(original: Any) -> Any:
    def error(self: Any, message: str) -> Any:
        choice = re.search(r"invalid choice: '([^']*)'", message)
        if choice and (mode := canonical(choice[1])):
            message += (
                f". {choice[1]!r} is a mode of torch-bf16, which this script does not know: leave "
                f"the option out, or name 'bf16', and set {MODE_VARIABLE}={mode} in the "
                f"environment, as `accelerate launch --mixed_precision {mode}` does"
            )
        return original(self, message)

    return error


def export_mode(original: Any) -> Any:
    """Export the mode so that it applies even to scripts that name one of Accelerate's."""

    def prepare(args: Any, *rest: Any, **kwargs: Any) -> Any:
        result = original(args, *rest, **kwargs)
        if mode := canonical(args.mixed_precision):
            environment = result[1] if isinstance(result, tuple) else result
            environment[MODE_VARIABLE] = mode
        return result

    return prepare


def export_mode_to_sagemaker(original: Any) -> Any:
    """Like :func:`export_mode`, in the environment of SageMaker's estimator."""

    def prepare(sagemaker_config: Any, args: Any) -> Any:
        estimator, inputs = original(sagemaker_config, args)
        if mode := canonical(args.mixed_precision):
            estimator["environment"][MODE_VARIABLE] = mode
        return estimator, inputs

    return prepare


def ask_options(original: Any) -> Any:
    """Offer the modes in the questionnaire of ``accelerate config``."""

    def _ask_options(
        input_text: str, options: Any = (), convert_value: Any = None, default: int = 0
    ) -> Any:
        from accelerate.commands.config import config_utils

        if convert_value is not config_utils._convert_mixed_precision:
            return original(input_text, options, convert_value, default)
        n = len(options)

        def convert(index: Any) -> Any:
            chosen = int(index)
            if chosen < n:
                return convert_value(index)
            return config_utils.PrecisionType(MODES[chosen - n])

        return original(input_text, [*options, *MODES], convert, default)

    return _ask_options


def write_basic_config(original: Any) -> Any:
    """Write a mode into the file, also for ``accelerate config default``."""

    def write_basic_config(mixed_precision: Any = "no", *args: Any, **kwargs: Any) -> Any:
        mode = canonical(mixed_precision)
        path = original("no" if mode else mixed_precision, *args, **kwargs)
        if mode and path:
            config = json.loads(Path(path).read_text(encoding="utf-8"))
            config["mixed_precision"] = mode
            # In Accelerate's own format.
            text = json.dumps(config, indent=2, sort_keys=True) + "\n"
            Path(path).write_text(text, encoding="utf-8")
        return path

    return write_basic_config


def test_command(original: Any) -> Any:
    """Launch our own test if the configuration names one of our modes."""

    def test_command(args: Any) -> Any:
        from accelerate.commands import test
        from accelerate.commands.config import config_args

        path = args.config_file or config_args.default_config_file
        config = config_args.load_config_from_file(path) if os.path.isfile(path) else None
        if config is None or canonical(config.mixed_precision) is None:
            return original(args)
        options = [f"--config_file={args.config_file}"] if args.config_file else []
        script = str(Path(__file__).parents[1] / "selftest.py")
        done = test.execute_subprocess_async(["accelerate-launch", *options, script])
        if done.returncode == 0:
            print("Test is a success! You are ready for your distributed training!")

    return test_command


def notebook_launcher(original: Any) -> Any:
    """Export the mode to the launched processes."""

    def notebook_launcher(
        function: Any,
        args: Any = (),
        num_processes: int | None = None,
        mixed_precision: Any = "no",
        *rest: Any,
        **kwargs: Any,
    ) -> Any:
        from accelerate.utils import patch_environment

        mode = canonical_or_refuse(str(mixed_precision), "mixed_precision")
        # Accelerate exports the mode under a name that nothing reads.
        names = {LAUNCHER_VARIABLE: mode, MODE_VARIABLE: mode}
        with patch_environment(**names) if mode else nullcontext():
            return original(function, args, num_processes, mixed_precision, *rest, **kwargs)

    return notebook_launcher
