"""Everything about a GPU in one command: `make gpu`. Part by part, and a part once per source tree.

Runs the selftest, the tests that need a GPU, and the benchmark against installed libraries. Output
and measurements go to examples/results/<date>-<gpu>/, and the README's table of GPUs is written
from all such records. After an interruption or a failure, the same command continues where it
stopped. Without a GPU the same parts run on the CPU, smaller, into build/gpu-rehearsal/, and the
README stays as it is.

For a GPU that is rented for minutes, `--minutes 9` ends in time, `--only selftest,tests` runs these
two parts, and `--archive FILE` packs the record after each part, to be unpacked in the root of
another copy of the tree.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import re
import shlex
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "examples" / "results"
BEGIN, END = (
    "<!-- gpu table: written by examples/gpu_record.py -->",
    "<!-- end of the gpu table -->",
)
WAYS = ("moved", "graph", "zero-rows")
PEERS = "torch,torchao,flashoptim,optimi,bitsandbytes,torchastic,pytorch-optimizer"
# Time limit of each part in seconds. On an H200 all take about a quarter of that.
LIMITS = {
    "selftest": 300,
    "tests": 540,
    "gpt2-124m": 300,
    "llama-1b": 300,
    "training": 120,
    "gpt2-124m-offload": 120,
    "gpt2-124m-heavyball": 300,
    "llama-1b-offload": 300,
}
# The sources that a part's result depends on, besides its command line.
CORE = ("kernels",)
ALL = (*CORE, "lightning_bf16", "accelerate_bf16", "tests", "pyproject.toml")
# With less time left no part is started; how long an interrupted part may take to end; characters
# of a failed part's output that are shown.
LEAST_SECONDS, GRACE_SECONDS, SHOWN = 20, 15, 4000


def parts_for(device: str, tests: Sequence[str]) -> dict[str, list[str]]:
    """Return the command line of each part, which runs in the part's folder."""
    python, bench = [sys.executable, "-m"], ["torch_bf16", "bench", "--device", device]
    check = ["torch_bf16", "selftest", "--device", device]
    ways = ["--ways", ",".join(WAYS), "--rounds", "20", "--time-limit", "60"]
    # Parts of their own, so that no other part fails with them: one needs gigabytes of pinned
    # memory, one compiles a single graph for minutes.
    offload = ["--against", "torch,offload", "--rounds", "10", "--time-limit", "120"]
    heavyball = ["--against", "heavyball", "--rounds", "10", "--time-limit", "240"]
    models = {
        "gpt2-124m": ["--model", "gpt2-124m", "--against", PEERS, *ways],
        "llama-1b": ["--model", "llama-1b", "--against", PEERS, *ways],
        "training": ["--training", "--layers", "12", "--tokens", "4096", "--rounds", "20"],
        "gpt2-124m-offload": ["--model", "gpt2-124m", *offload],
        "gpt2-124m-heavyball": ["--model", "gpt2-124m", *heavyball],
        "llama-1b-offload": ["--model", "llama-1b", *offload],
    }
    if device == "cpu":
        small = ["--parameters", "2e6", "--tensors", "30", "--rounds", "3", "--against", "torch"]
        models = dict.fromkeys(models, small)
        one = ["--recipes", "bf16-stochastic", "--layers", "1", "--tokens", "8", "--rounds", "1"]
        models["training"] = ["--training", *one]
    workers = min(16, os.cpu_count() or 1) if device != "cpu" else 2
    found = {
        "selftest": [*python, *check, "--json", "selftest.json"],
        "tests": [
            *(*python, "pytest", "-v", "-n", str(workers), "-m", "gpu"),
            # pytest-benchmark, where it is installed, warns of xdist, and warnings are errors.
            *("--durations", "20", "-p", "no:cacheprovider", "-p", "no:benchmark"),
            *("--rootdir", str(ROOT), "-c", str(ROOT / "pyproject.toml")),
            *(str(ROOT / each) for each in tests),
        ],
    }
    for name, options in models.items():
        file = "training.json" if name == "training" else f"bench-{name}.json"
        found[name] = [*python, *bench, *options, "--json", file]
    return found


def source_key(part: str, command: Sequence[str]) -> str:
    """Return a digest of all sources that a part's result depends on, committed or not."""
    digest = hashlib.blake2b(shown(command).encode(), digest_size=16)
    for room in ALL if part == "tests" else CORE:
        place = ROOT / room
        files = [place] if place.is_file() else sorted(place.rglob("*"))
        for file in files:
            if file.suffix in (".py", ".txt", ".toml") and file.is_file():
                digest.update(file.relative_to(ROOT).as_posix().encode() + file.read_bytes())
    return digest.hexdigest()


def shown(command: Sequence[str]) -> str:
    """Return a command line as it is typed in the root of the tree."""
    return shlex.join(["python", *command[1:]]).replace(f"{ROOT}/", "").replace(str(ROOT), ".")


def commit() -> str | None:
    """Return the tree's commit, marked if the tree was changed; None outside of a repository."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=40"]
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except OSError:
        return None
    return done.stdout.strip() or None


def folder_for(results: Path, gpu: str, keys: Mapping[str, str]) -> Path:
    """Return the folder in which this tree was started on such a GPU, else a new one, by date."""
    name = re.sub(r"[^a-z0-9]+", "-", gpu.lower()).strip("-")
    for each in sorted(results.glob(f"*-{name}"), reverse=True):
        parts = _state(each).get("parts", {})
        if any(parts.get(part, {}).get("source") == key for part, key in keys.items()):
            return each
    return results / f"{datetime.now(timezone.utc):%Y-%m-%d}-{name}"


def _state(folder: Path) -> dict[str, Any]:
    try:
        return json.loads((folder / "run.json").read_text())
    except (OSError, ValueError):
        return {}


def environment() -> dict[str, str]:
    """Return an environment with this tree's packages first: others may be installed, or none."""
    paths = [str(ROOT / "kernels"), str(ROOT), os.environ.get("PYTHONPATH", "")]
    # Unbuffered, so that the output of a killed part shows how far it got.
    path = os.pathsep.join(filter(None, paths))
    return {**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}


def run(
    folder: Path,
    parts: Mapping[str, Sequence[str]],
    keys: Mapping[str, str],
    deadline: float = math.inf,
    archive: Path | None = None,
) -> bool:
    """Run the parts that have not succeeded with their present sources.

    Args:
        folder: the folder of the record.
        parts: command lines by the part's name.
        keys: results of :func:`source_key` by the part's name.
        deadline: the value of ``time.monotonic()`` by which the last part is ended.
        archive: the file that the record is packed into after each part; None for no file.

    Returns:
        Whether all parts have succeeded now.
    """
    folder.mkdir(parents=True, exist_ok=True)
    state = {"commit": commit(), "parts": _state(folder).get("parts", {})}
    right = True
    for name, command in parts.items():
        before = state["parts"].get(name, {})
        if before.get("status") == 0 and before.get("source") == keys[name]:
            print(f"{name}: done before")
            continue
        left = deadline - time.monotonic() - GRACE_SECONDS
        if left < LEAST_SECONDS:
            print(f"{name}: no time left; the same command continues with it")
            right = False
            continue
        print(f"{name}: {shown(command)}", flush=True)
        facts: dict[str, Any] = {"command": shown(command), "source": keys[name]}
        start = time.perf_counter()
        # Recorded when it starts, too: something may kill this process.
        for status in ("under way", None):
            if status is None:
                status = _run_part(command, folder, name, min(LIMITS[name], left))
            seconds = round(time.perf_counter() - start, 1)
            state["parts"][name] = {**facts, "status": status, "seconds": seconds}
            (folder / "run.json").write_text(json.dumps(state, indent=2) + "\n")
        if archive is not None:
            pack(folder, archive)
        right = right and status == 0
        print(f"{name}: {'ok' if status == 0 else f'failed ({status})'}, {seconds} s", flush=True)
        if status != 0:
            text = (folder / f"{name}.txt").read_text(errors="replace")
            print(f"... the end of {folder / name}.txt:\n{text[-SHOWN:]}", flush=True)
    return right


def _run_part(command: Sequence[str], folder: Path, name: str, limit: float) -> int | str:
    """Run a part and end all its processes; return its exit status, or ``"timeout"``."""
    with (folder / f"{name}.txt").open("w") as output:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=environment(),
            stdout=output,
            stderr=subprocess.STDOUT,
            preexec_fn=_prepare_part,
        )
        try:
            return process.wait(limit)
        except subprocess.TimeoutExpired:
            # Like Ctrl-C: pytest then reports what has failed so far.
            process.send_signal(signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                process.wait(GRACE_SECONDS)
            return "timeout"
        finally:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _prepare_part() -> None:
    # Workers that outlived the part would keep the GPU busy.
    os.setpgrp()
    # A shell lets what it runs in the background ignore interrupts.
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def pack(folder: Path, archive: Path) -> None:
    """Pack a record into one archive, under its path in the tree."""
    new = archive.with_name(f"{archive.name}.new")
    with tarfile.open(new, "w:gz") as file:
        file.add(folder, folder.relative_to(ROOT) if folder.is_relative_to(ROOT) else folder.name)
    new.replace(archive)


def table(results: Path) -> str:
    """Return the README's tables: one for each record of a GPU, with a row for each optimizer."""
    tables = [_table_of(folder) for folder in sorted(results.glob("*"), reverse=True)]
    nothing = "No GPU has been measured yet: `make gpu` measures one and writes this table."
    return "\n\n".join(filter(None, tables)) or nothing


def _table_of(folder: Path) -> str | None:
    """The table of one record, fastest first; the rows of other ways to step are left out."""
    rows: dict[str, dict[str, Any]] = {}
    models: dict[str, None] = {}
    device = None
    for record in _measured_in(folder):
        if record.get("device_type") != "cuda":
            continue
        device = record["hardware"]["device"]
        models[record["model"]] = None
        for row in record["results"]:
            if row["name"].rpartition(", ")[2] not in WAYS:
                # The baseline is in every record, and the first counts.
                rows.setdefault(row["name"], {}).setdefault(record["model"], row)
    if device is None:
        return None
    head = [f"AdamW on an [{device}](examples/results/{folder.name})"]
    for model in models:
        head += [f"{model}, ms", "to torch fused"]
    lines = [f"| {' | '.join([*head, 'bytes each'])} |", "|---" + "|---:" * len(head) + "|"]
    for name, found in sorted(rows.items(), key=lambda item: _times(item[1], models)):
        cells = [name]
        for model in models:
            row = found.get(model)
            cells += map(_three_digits, (row["ms"], row["ratio"])) if row else ("-", "-")
        first = next(iter(found.values()))
        lines.append(f"| {' | '.join([*cells, format(first['bytes_per_parameter'], '.2f')])} |")
    return "\n".join(lines)


def _three_digits(times: Mapping[str, float]) -> str:
    return f"{times['median']:#.3g}".removesuffix(".")


def _measured_in(folder: Path) -> Iterator[dict[str, Any]]:
    """The records of timed steps in a folder: of benchmarks, then of the selftest."""
    for file in sorted(folder.glob("bench-*.json")):
        yield json.loads(file.read_text())
    selftest = folder / "selftest.json"
    if selftest.exists():
        yield from json.loads(selftest.read_text())["speed"]


def _times(found: Mapping[str, Any], models: Iterable[str]) -> list[float]:
    return [found[model]["ms"]["median"] if model in found else math.inf for model in models]


def written_into(readme: str, lines: str) -> str:
    """Return the README with another table between the two marks.

    Raises:
        ValueError: the marks are not there exactly once each and in this order.
    """
    before, mark, rest = readme.partition(BEGIN)
    _, other, after = rest.partition(END)
    if not mark or not other or BEGIN in after or END in after:
        raise ValueError(f"README.md must have {BEGIN!r} once and {END!r} once after it")
    return f"{before}{BEGIN}\n\n{lines}\n\n{END}{after}"


def gpu_test_files() -> list[str]:
    """Return the core's test files that need a GPU, according to their name or text."""
    found = []
    for file in sorted((ROOT / "tests").rglob("test_*.py")):
        path = file.relative_to(ROOT).as_posix()
        text = file.read_text()
        if re.search(r"mark\.gpu|from gpu_marks import .*(gpus|each_device)", text):
            found.append(path)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), help="default: cuda if there is a GPU")
    parser.add_argument("--only", help="run only these parts, as in --only selftest,tests")
    parser.add_argument(
        "--minutes", type=float, default=math.inf, help="time by which everything has ended"
    )
    parser.add_argument(
        "--archive", type=Path, help="pack the record into this file after each part"
    )
    parser.add_argument("--table", action="store_true", help="only write the README's table anew")
    options = parser.parse_args()
    deadline = time.monotonic() + 60 * options.minutes
    readme = ROOT / "README.md"
    if options.table:
        readme.write_text(written_into(readme.read_text(), table(RESULTS)))
        return 0
    import torch

    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    parts = parts_for(device, gpu_test_files())
    if options.only is not None:
        wanted = options.only.split(",")
        if unknown := set(wanted) - parts.keys():
            parser.error(f"no part {', '.join(unknown)}; there are {', '.join(parts)}")
        parts = {name: parts[name] for name in parts if name in wanted}
    keys = {name: source_key(name, command) for name, command in parts.items()}
    if device == "cpu":
        print("no GPU: a rehearsal on the CPU, smaller, with the gpu tests skipped; no README")
        folder = ROOT / "build" / "gpu-rehearsal"
    else:
        folder = folder_for(RESULTS, torch.cuda.get_device_name(), keys)
    print(f"results: {folder}")
    try:
        right = run(folder, parts, keys, deadline, options.archive)
    except KeyboardInterrupt:
        print("interrupted; the same command goes on with the part that was running")
        return 130
    if device != "cpu":
        readme.write_text(written_into(readme.read_text(), table(RESULTS)))
        print("README.md: the table of GPUs is written")
    print(
        "all parts are done" if right else "not all parts are right; the same command tries again"
    )
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
