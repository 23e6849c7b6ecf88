"""The command line, ``python -m torch_bf16 COMMAND``; ``--help`` lists the commands."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from .output import exit_status

__all__ = ["main"]


class _Command(NamedTuple):
    """A command: its line of help, and what loads the functions that declare options and run it.

    The function that runs it gets the options and all arguments, or, if the command ``passes_on``,
    only the arguments after ``--``.
    """

    help: str
    load: Callable[[], tuple[Callable, Callable]]
    passes_on: bool = False


def _info() -> tuple[Callable, Callable]:
    from .info.command import add_info_arguments, info

    return add_info_arguments, lambda options, arguments: info(options)


def _estimate() -> tuple[Callable, Callable]:
    from .estimate.command import add_estimate_arguments, estimate

    return add_estimate_arguments, lambda options, arguments: estimate(options)


def _recommend() -> tuple[Callable, Callable]:
    from .recommend.command import add_recommend_arguments, recommend

    return add_recommend_arguments, recommend


def _doctor() -> tuple[Callable, Callable]:
    from .doctor.command import add_doctor_arguments, doctor

    return add_doctor_arguments, lambda options, arguments: doctor(options)


def _compare() -> tuple[Callable, Callable]:
    from .compare.command import add_compare_arguments, compare

    return add_compare_arguments, compare


def _bench() -> tuple[Callable, Callable]:
    from .bench.command import add_bench_arguments, bench

    return add_bench_arguments, bench


def _selftest() -> tuple[Callable, Callable]:
    from .selftest.command import add_selftest_arguments, selftest

    return add_selftest_arguments, selftest


def _export() -> tuple[Callable, Callable]:
    from .export import add_export_arguments, export

    return add_export_arguments, lambda options, arguments: export(options)


# A command's module is imported when the command is called: none waits for another's imports.
_COMMANDS: Mapping[str, _Command] = {
    "info": _Command("what a bug report needs: versions, hosts, backends, obstacles", _info),
    "estimate": _Command("will it fit? Bytes of a model's run in every precision", _estimate),
    "recommend": _Command("which recipe loses nothing of this training?", _recommend, True),
    "doctor": _Command("has this run been learning? Examines one checkpoint or two", _doctor),
    "compare": _Command(
        "train in several precisions, or read finished runs, onto one page", _compare
    ),
    "bench": _Command("time AdamW steps against those of torch and other libraries", _bench),
    "selftest": _Command("does it work on this machine, and how fast?", _selftest),
    "export": _Command("write the exact fp32 weights of a checkpoint", _export),
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
    run: Any = None
    commands = parser.add_subparsers(dest="command", required=True)
    parsers = {name: commands.add_parser(name, help=each.help) for name, each in _COMMANDS.items()}
    command = next(iter(arguments), "")
    if command in parsers:
        declare, run = _COMMANDS[command].load()
        declare(parsers[command])
    passed_on = arguments
    if command in parsers and _COMMANDS[command].passes_on:
        end = arguments.index("--") if "--" in arguments else len(arguments)
        arguments, passed_on = arguments[:end], arguments[end + 1 :]
    options = parser.parse_args(arguments)
    return exit_status(command, lambda: run(options, passed_on))
