"""The command line, ``python -m torch_bf16 COMMAND``; ``--help`` lists the commands."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from .output import exit_status, only_json

__all__ = ["main"]


class _Command(NamedTuple):
    """A command ``name``.

    Attributes:
        module: it has ``add_name_arguments(parser)``, which declares the options, and
            ``name(options)``, which runs the command and returns the exit status. It is imported
            when the command is called: none waits for another's imports.
        help: its line of help.
        passes_on: whether arguments after ``--`` are those of a program that it runs.
    """

    module: str
    help: str
    passes_on: bool = False


_COMMANDS: Mapping[str, _Command] = {
    "info": _Command(
        "info.command", "what a bug report needs: versions, hosts, backends, obstacles"
    ),
    "estimate": _Command(
        "estimate.command", "will it fit? Bytes of a model's run in every precision"
    ),
    "recommend": _Command(
        "recommend.command", "which recipe loses nothing of this training?", passes_on=True
    ),
    "doctor": _Command(
        "doctor.command", "has this run been learning? Examines one checkpoint or two"
    ),
    "compare": _Command(
        "compare.command", "train in several precisions, or read finished runs, onto one page"
    ),
    "bench": _Command(
        "bench.command", "time AdamW steps against those of torch and other libraries"
    ),
    "selftest": _Command("selftest.command", "does it work on this machine, and how fast?"),
    "export": _Command("export", "write the exact fp32 weights of a checkpoint"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command.

    Args:
        arguments: without the program's name; those of the process if None is passed.

    Returns:
        The exit status: 2 after an error meant for the user, 130 after Ctrl-C, else the command's.
    """
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    parser = argparse.ArgumentParser(
        "python -m torch_bf16", description="What bf16 training takes, keeps and loses."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    parsers = {name: commands.add_parser(name, help=each.help) for name, each in _COMMANDS.items()}
    name = next(iter(arguments), "")
    command = _COMMANDS.get(name)
    if command is None:
        parser.parse_args(arguments)  # which has the help and messages of its own
        parser.error("the command comes first")

    def run() -> int:
        module = importlib.import_module(f"{__package__}.{command.module}")
        getattr(module, f"add_{name}_arguments")(parsers[name])
        options = _options(parser, parsers[name], command, arguments)
        with only_json(getattr(options, "json", None)):
            return getattr(module, name)(options)

    return exit_status(name, run)


def _options(
    parser: argparse.ArgumentParser,
    of_command: argparse.ArgumentParser,
    command: _Command,
    arguments: Sequence[str],
) -> argparse.Namespace:
    """Parse a command line, and add where a command finds its program's arguments, or all."""
    own, passed_on = arguments, arguments
    if command.passes_on:
        end = arguments.index("--") if "--" in arguments else len(arguments)
        own, passed_on = arguments[:end], arguments[end + 1 :]
    options, unknown = parser.parse_known_args(own, argparse.Namespace(arguments=passed_on))
    if unknown:
        where = "; arguments of the script go after --" if command.passes_on else ""
        of_command.error(f"unrecognized arguments: {' '.join(unknown)}{where}")
    return options
