"""Everything about a GPU in one command: `make gpu`. Part by part, and a part once per source tree.

Runs the selftest, the tests that need a GPU, and the benchmark against installed libraries. Output
and measurements go to examples/results/<date>-<gpu>/, and the README's table of GPUs is written
from all such records. After an interruption or a failure, the same command continues where it
stopped. Without a GPU the same parts run on the CPU, smaller, into build/gpu-rehearsal/, and the
README stays as it is.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "examples" / "results"
BEGIN, END = (
    "<!-- gpu table: written by examples/gpu_record.py -->",
    "<!-- end of the gpu table -->",
)
PEERS = (
    "torch,torchao,flashoptim,optimi,bitsandbytes,torchastic,heavyball,pytorch-optimizer,offload"
)
# Time limit of each part in seconds; together they should take less than 20 minutes.
LIMITS = {"selftest": 300, "tests": 900, "gpt2-124m": 400, "llama-1b": 400}


def parts_for(device: str, tests: Sequence[str]) -> dict[str, list[str]]:
    """Return the command line of each part, which runs in the part's folder."""
    python, bench = [sys.executable, "-m"], ["torch_bf16", "bench", "--device", device]
    check = ["torch_bf16", "selftest", "--device", device]
    small = ["--parameters", "2e6", "--tensors", "30", "--rounds", "3", "--against", "torch"]
    full = ["--against", PEERS, "--ways", "moved,graph,zero-rows", "--time-limit", "120"]
    models = {name: ["--model", name, *full] for name in ("gpt2-124m", "llama-1b")}
    if device == "cpu":
        models = dict.fromkeys(models, small)
    found = {
        "selftest": [*python, *check, "--json", "selftest.json"],
        "tests": [*python, "pytest", "-n", "8" if device != "cpu" else "2", "-m", "gpu"]
        + ["-p", "no:cacheprovider", "--rootdir", str(ROOT), "-c", str(ROOT / "pyproject.toml")]
        + [str(ROOT / each) for each in tests],
    }
    for name, options in models.items():
        found[name] = [*python, *bench, *options, "--json", f"bench-{name}.json"]
    return found


def source_key() -> str:
    """Return a digest of all sources that a part's result depends on, committed or not."""
    digest = hashlib.blake2b(digest_size=16)
    for room in ("kernels", "lightning_bf16", "accelerate_bf16", "tests", "examples/gpu_record.py"):
        place = ROOT / room
        for file in [place] if place.is_file() else sorted(place.rglob("*.py")):
            digest.update(file.relative_to(ROOT).as_posix().encode() + file.read_bytes())
    return digest.hexdigest()


def commit() -> str | None:
    """Return the tree's commit, marked if the tree was changed; None outside of a repository."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=40"]
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except OSError:
        return None
    return done.stdout.strip() or None


def folder_for(results: Path, gpu: str, key: str) -> Path:
    """Return the folder in which this tree was started on such a GPU, else a new one, by date."""
    name = re.sub(r"[^a-z0-9]+", "-", gpu.lower()).strip("-")
    for each in sorted(results.glob(f"*-{name}")):
        if _state(each).get("source") == key:
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
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}


def run(folder: Path, parts: dict[str, list[str]], key: str) -> bool:
    """Run the parts that have not succeeded for this source tree; return whether all have now."""
    folder.mkdir(parents=True, exist_ok=True)
    state = _state(folder)
    if state.get("source") != key:
        state = {"source": key, "commit": commit(), "parts": {}}
    for name, command in parts.items():
        if state["parts"].get(name, {}).get("status") == 0:
            print(f"{name}: done before")
            continue
        shown = shlex.join(["python", *command[1:]]).replace(f"{ROOT}/", "").replace(str(ROOT), ".")
        print(f"{name}: {shown}", flush=True)
        start = time.perf_counter()
        with (folder / f"{name}.txt").open("w") as output:
            try:
                done = subprocess.run(
                    command,
                    cwd=folder,
                    env=environment(),
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    timeout=LIMITS[name],
                )
                status = done.returncode
            except subprocess.TimeoutExpired:
                status = "timeout"
        seconds = round(time.perf_counter() - start, 1)
        state["parts"][name] = {"command": shown, "status": status, "seconds": seconds}
        (folder / "run.json").write_text(json.dumps(state, indent=2) + "\n")
        outcome = "ok" if status == 0 else f"failed ({status}), see {folder / name}.txt"
        print(f"{name}: {outcome}, {seconds} s", flush=True)
    return all(state["parts"].get(name, {}).get("status") == 0 for name in parts)


def table(results: Path) -> str:
    """Return the README's table: a row for each model and optimizer of each record of a GPU."""
    rows = []
    for file in sorted(results.glob("*/bench-*.json")):
        record = json.loads(file.read_text())
        if record.get("device_type") != "cuda":
            continue
        link = f"[{record['hardware']['device']}](examples/results/{file.parent.name})"
        for row in record["results"]:
            rows.append(
                f"| {link} | {record['model']} | {row['name']} | {row['ms']['median']:.3f} | "
                f"{row['ratio']['median']:.2f} | {row['share_of_copy']:.0%} | "
                f"{row['bytes_per_parameter']:.2f} |"
            )
    if not rows:
        return "No GPU has been measured yet: `make gpu` measures one and writes this table."
    head = ("GPU", "model", "AdamW", "ms per step", "to torch fused", "of a copy", "bytes each")
    lines = [f"| {' | '.join(head)} |", "|---" * 3 + "|---:" * 4 + "|"]
    return "\n".join([*lines, *rows])


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
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), help="default: cuda where there is one"
    )
    parser.add_argument("--table", action="store_true", help="only write the README's table anew")
    options = parser.parse_args()
    readme = ROOT / "README.md"
    if options.table:
        readme.write_text(written_into(readme.read_text(), table(RESULTS)))
        return 0
    import torch

    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    key = source_key()
    if device == "cpu":
        print("no GPU: a rehearsal on the CPU, smaller, with the gpu tests skipped; no README")
        folder = ROOT / "build" / "gpu-rehearsal"
    else:
        folder = folder_for(RESULTS, torch.cuda.get_device_name(), key)
    print(f"results: {folder}")
    try:
        right = run(folder, parts_for(device, gpu_test_files()), key)
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
