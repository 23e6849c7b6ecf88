"""What a page of Markdown lets its reader run, and how a test runs it.

All Python of a page is one program, block after block, in a process of its own. In a page:

- a fence `python` is run, and so is a comment `<!-- python ... -->`, which readers do not see;
- a fence `diff` is two programs, before and after: both are run;
- a fence `text` that follows at once, behind blank lines, is what the block above it prints, with
  `...` for what may differ; it may follow a fence `bash`, too, which is run then and only then;
- hidden programs find the repository as `repository`;
- a comment `<!-- needs: NAME, NAME -->` before a block leaves it out where one of these modules
  cannot be imported, or, for `cuda`, where there is no GPU; of a `diff` the program before alone.
"""

from __future__ import annotations

import contextlib
import doctest
import importlib.util
import io
import json
import os
import re
import subprocess
import sys
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forked_scripts import call_in_fork

ROOT = Path(__file__).parents[2]
_BLOCK = re.compile(
    r"(?:^<!-- needs: (?P<needs>[\w, ]+) -->\n\s*)?"
    r"(?:^```(?P<language>python|bash|diff)\n(?P<code>.*?)^```$"
    r"|^<!-- python\n(?P<hidden>.*?)^-->$)"
    r"(?:\n\s*```text\n(?P<output>.*?)^```$)?",
    re.M | re.S,
)
# Compiling takes longer than what a page shows, and many CPUs are slow at products in bf16.
_QUICK = {"BF16_BACKEND": "eager", "TORCH_BF16_BACKEND": "eager", "BF16_COMPUTE": "fp32"}


@dataclass(frozen=True)
class Block:
    """A program or a part of one, and where it stands in its page.

    Attributes:
        line: of its fence, from 1.
        language: `python` or `bash`.
        code: as it is run.
        output: what it must print; None where the page does not say.
        needs: what it is left out without, with commas; empty for nothing.
    """

    line: int
    language: str
    code: str
    output: str | None = None
    needs: str = ""


def blocks_of(page: str) -> Iterator[Block]:
    """The blocks of a page's text that are run, in order."""
    for found in _BLOCK.finditer(page):
        language = found["language"] or "python"
        code = found["code"] if found["language"] else found["hidden"]
        line = page.count("\n", 0, found.start("code" if found["language"] else "hidden"))
        needs, output = found["needs"] or "", found["output"]
        if language == "diff":
            for sign, needed in (("-", needs), ("+", "")):
                lines = [each[1:] for each in code.splitlines() if each[:1] in ("", " ", sign)]
                yield Block(line, "python", "\n".join(lines), None, needed)
        elif language == "python" or output is not None:
            yield Block(line, language, code, output, needs)


def run_page(path: Path, folder: Path) -> tuple[str, int, list[str]]:
    """Run a page in a process of its own.

    Args:
        path: of the page.
        folder: an empty one, where its programs run.

    Returns:
        What went wrong, empty where nothing did, how many blocks ran, and the missing modules for
        whose sake others were left out.
    """
    found = folder / "found.json"
    printed = call_in_fork(_write, path, found, folder=folder, seconds=840, **_QUICK)
    said: dict[str, Any] = json.loads(found.read_text())
    return said["fault"] and said["fault"] + printed, said["ran"], said["missing"]


def _write(path: Path, found: Path) -> None:
    found.write_text(json.dumps(_run(str(path), [*blocks_of(path.read_text())])))


def _run(path: str, blocks: list[Block]) -> dict[str, Any]:
    """Run the blocks in this process, up to the first that fails."""
    names: dict[str, Any] = {"__name__": "__main__", "repository": ROOT}
    found: dict[str, Any] = {"fault": "", "ran": 0, "missing": []}
    for block in blocks:
        if missing := [need for need in block.needs.split(", ") if need and not _has(need)]:
            found["missing"] += missing
            continue
        found["ran"] += 1
        printed = io.StringIO()
        try:
            if block.language == "bash":
                printed.write(_shell(block.code))
            else:
                # At its line in the page, for tracebacks.
                code = compile("\n" * block.line + block.code, path, "exec")
                with contextlib.redirect_stdout(printed):
                    exec(code, names)
        except BaseException:
            return found | {"fault": f"{traceback.format_exc()}\n{printed.getvalue()}"}
        options = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
        checker = doctest.OutputChecker()
        if block.output is not None and not checker.check_output(
            block.output, printed.getvalue(), options
        ):
            fault = f"{path}, line {block.line} prints\n{printed.getvalue()}and not\n{block.output}"
            return found | {"fault": fault}
    return found


def _has(need: str) -> bool:
    if need == "cuda":
        import torch

        return torch.cuda.is_available()
    return importlib.util.find_spec(need) is not None


def _shell(command: str) -> str:
    """What a command prints; `python` is this one."""
    command = re.sub(r"^python\b", sys.executable, command, flags=re.M)
    # `info` says what the environment asks for.
    environment = {name: each for name, each in os.environ.items() if name not in _QUICK}
    done = subprocess.run(
        ["bash", "-euc", command],
        env=environment,
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{command}: {done.stdout}{done.stderr}")
    return done.stdout
