"""Everything about a GPU in one command: `make gpu`. Part by part, and a part once per source tree.

Runs the selftest, the tests that need a GPU, the benchmark against installed libraries, and what a
step costs the host. Output and measurements go to examples/results/<date>-<gpu>/, and gpu_table.py
writes the README's tables of GPUs from all such records. After an interruption or a failure, the
same command continues where it stopped. Without a GPU the same parts run on the CPU, smaller, into
build/gpu-rehearsal/, and the README stays as it is.

For a GPU that is rented for minutes, `--minutes 9` ends in time, `--only selftest,tests` runs these
two parts, and `--archive FILE` packs the record after each part, to be unpacked in the root of
another copy of the tree.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
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
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import gpu_table
from gpu_table import RESULTS, ROOT, WAYS

PEERS = "torch,torchao,flashoptim,optimi,bitsandbytes,torchastic,pytorch-optimizer"
# The parts in order, each with its time limit in seconds. On an H200 they took 57, 58, 135, 139,
# 17, 30, 21, 85 and 137; the last one has not run.
LIMITS = {
    "selftest": 300,
    "tests": 540,
    "gpt2-124m": 300,
    "llama-1b": 300,
    "host-time": 120,
    "training": 120,
    "gpt2-124m-offload": 120,
    "llama-1b-offload": 300,
    "gpt2-124m-heavyball": 300,
    "llama-1b-heavyball": 300,
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
    in_ways = ["--ways", ",".join(WAYS), "--time-limit", "60"]
    # Parts of their own, so that no other part fails with them: one needs gigabytes of pinned
    # memory, one compiles a single graph for minutes.
    offload = ["--against", "torch,offload", "--rounds", "10", "--time-limit", "120"]
    heavyball = ["--against", "heavyball", "--rounds", "10", "--time-limit", "240"]
    models = {
        "gpt2-124m": ["--model", "gpt2-124m", "--against", PEERS, *in_ways, "--rounds", "20"],
        "llama-1b": ["--model", "llama-1b", "--against", PEERS, *in_ways, "--rounds", "10"],
        "training": ["--training", "--layers", "12", "--tokens", "4096", "--rounds", "20"],
        "gpt2-124m-offload": ["--model", "gpt2-124m", *offload],
        "gpt2-124m-heavyball": ["--model", "gpt2-124m", *heavyball],
        "llama-1b-heavyball": ["--model", "llama-1b", *heavyball],
        "llama-1b-offload": ["--model", "llama-1b", *offload],
    }
    if device == "cpu":
        small = ["--parameters", "2e6", "--tensors", "30", "--rounds", "3", "--against", "torch"]
        models = dict.fromkeys(models, small)
        one = ["--recipes", "bf16-stochastic", "--layers", "1", "--tokens", "8", "--rounds", "1"]
        models["training"] = ["--training", *one]
    host = ["--tensors", "150", "5000", "--blocks", "20"]
    if device == "cpu":
        host = ["--tensors", "30", "--blocks", "2"]
    workers = ["-n", "auto", "--maxprocesses", "16" if device != "cpu" else "2"]
    found = {
        "selftest": [*python, *check, "--json", "selftest.json"],
        "tests": [
            *(*python, "pytest", "-v", *workers, "-m", "gpu"),
            # pytest-benchmark, where it is installed, warns of xdist, and warnings are errors.
            *("--durations", "20", "-p", "no:cacheprovider", "-p", "no:benchmark"),
            *("--rootdir", str(ROOT), "-c", str(ROOT / "pyproject.toml")),
            *(str(ROOT / each) for each in tests),
        ],
        "host-time": [
            *(sys.executable, str(ROOT / "tests/proofs/host_time.py"), "--device", device, *host),
            *("--rows", "same gradients", "moved gradients", "random sets"),
            *("--only", "torch fused", "ours, triton", "ours, graphed"),
        ],
    }
    for name, options in models.items():
        found[name] = [*python, *bench, *options, "--json", f"bench-{name}.json"]
    return {name: found[name] for name in sorted(found, key=[*LIMITS].index)}


def source_key(part: str, command: Sequence[str], torch_version: str) -> str:
    """Return a digest of all sources that a part's result depends on, committed or not."""
    digest = hashlib.blake2b(f"{torch_version} {shown(command)}".encode(), digest_size=16)
    for room in ALL if part in ("tests", "host-time") else CORE:
        place = ROOT / room
        files = [place] if place.is_file() else sorted(place.rglob("*"))
        for file in files:
            if file.suffix in (".py", ".txt", ".toml") and file.is_file():
                digest.update(file.relative_to(ROOT).as_posix().encode() + file.read_bytes())
    return digest.hexdigest()


def shown(command: Sequence[str]) -> str:
    """Return a command line as it is typed in the root of the tree."""
    return without_places(shlex.join(["python", *command[1:]]))


def without_places(text: str) -> str:
    """Return a text without the folders in which this tree and this Python happen to be."""
    text = text.replace(sys.executable, "python")
    return text.replace(f"{ROOT}/", "").replace(str(ROOT), ".")


def commit() -> str | None:
    """Return the tree's commit, marked if the tree was changed; None outside of a repository."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=40"]
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except OSError:
        return None
    return done.stdout.strip() or None


def folder_for(results: Path, gpu: str, keys: Mapping[str, str]) -> Path:
    """Return the folder in which this tree was started on such a GPU, else a new one, by date.

    ``keys`` are those of all parts, also of those that are not to run now.
    """
    name = re.sub(r"[^a-z0-9]+", "-", gpu.lower()).strip("-")
    for each in sorted(results.glob(f"*-{name}"), reverse=True):
        parts = _state(each).get("parts", {})
        if any(parts.get(part, {}).get("source") == key for part, key in keys.items()):
            return each
    today = f"{datetime.now(timezone.utc):%Y-%m-%d}"
    # The record of another tree, measured on the same day, stays.
    names = (f"{today}-{number}-{name}" for number in itertools.count(2))
    return next(
        folder
        for each in itertools.chain([f"{today}-{name}"], names)
        if not (folder := results / each).exists()
    )


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
        archive: the file that the record is packed into after each part, ended by Ctrl-C or not;
            None for no file.

    Returns:
        Whether all parts have succeeded now.
    """
    folder.mkdir(parents=True, exist_ok=True)
    right = True
    for name, command in parts.items():
        try:
            right = _run_unless_done(folder, name, command, keys[name], deadline) and right
        finally:
            # After Ctrl-C as well, with what the part has said by then.
            if archive is not None:
                pack(folder, archive)
    return right


def _run_unless_done(
    folder: Path, name: str, command: Sequence[str], key: str, deadline: float
) -> bool:
    """Run a part, if it has not succeeded and there is time; return whether it has succeeded."""
    state = {"parts": _state(folder).get("parts", {})}
    before = state["parts"].get(name, {})
    if before.get("status") == 0 and before.get("source") == key:
        print(f"{name}: done before")
        return True
    left = deadline - time.monotonic() - GRACE_SECONDS
    if left < LEAST_SECONDS:
        print(f"{name}: no time left; the same command continues with it")
        return False
    print(f"{name}: {shown(command)}", flush=True)
    facts = {"command": shown(command), "source": key, "commit": commit()}
    if "--json" in command:
        # If this run fails, the figures of another one must not be taken for its own.
        (folder / command[command.index("--json") + 1]).unlink(missing_ok=True)
    start = time.perf_counter()
    # Recorded when it starts, too: something may kill this process.
    for status in ("under way", None):
        if status is None:
            status = _run_part(command, folder, name, min(LIMITS[name], left))
        seconds = round(time.perf_counter() - start, 1)
        state["parts"][name] = {**facts, "status": status, "seconds": seconds}
        (folder / "run.json").write_text(json.dumps(state, indent=2) + "\n")
    output = folder / f"{name}.txt"
    output.write_text(without_places(output.read_text(errors="replace")))
    print(f"{name}: {'ok' if status == 0 else f'failed ({status})'}, {seconds} s", flush=True)
    if status != 0:
        print(f"... the end of {output}:\n{output.read_text()[-SHOWN:]}", flush=True)
    return status == 0


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
    options = parser.parse_args()
    deadline = time.monotonic() + 60 * options.minutes
    if options.archive is not None and not options.archive.absolute().parent.is_dir():
        parser.error(f"--archive {options.archive} is in a folder that does not exist")
    import torch

    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    parts = parts_for(device, gpu_test_files())
    keys = {name: source_key(name, command, torch.__version__) for name, command in parts.items()}
    if options.only is not None:
        wanted = options.only.split(",")
        if unknown := set(wanted) - parts.keys():
            parser.error(f"no part {', '.join(unknown)}; there are {', '.join(parts)}")
        parts = {name: parts[name] for name in parts if name in wanted}
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
        gpu_table.main()
    asked_for = "" if options.only is None else " asked for"
    if right:
        print(f"all parts{asked_for} are done")
    else:
        print(f"not all parts{asked_for} are done; the same command goes on with the others")
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
