"""Other people's training scripts, unchanged, in four precisions: losses and dtypes side by side.

    python tests/hosts/scripts.py SOURCES
    python tests/hosts/scripts.py SOURCES --only by_feature --json record.json

SOURCES holds the sources of each host in folders of their names (``accelerate``, ``trl``), of a
checkout or a source distribution. Each script runs in fp32, in stock bf16 and in both modes, which
``BF16_MODE`` names, on tiny models and data; see `script_runner.py`. Exits with 1 where one that
runs in fp32 fails in a mode, ends elsewhere, or trains weights that are not bf16.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import fmean
from typing import Any

from script_rows import SCRIPTS, Script

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
MODES = ("bf16-stochastic", "bf16-fp32-master")
PRECISIONS = ("no", "bf16", *MODES)
BOUND = 600
PATH = os.pathsep.join([str(ROOT / "kernels"), str(ROOT)])


def variables(host: str, precision: str, path: str) -> dict[str, str]:
    """The environment of a host's scripts in one precision."""
    unset = ("ACCELERATE_", "BF16_")
    environment = {k: v for k, v in os.environ.items() if not k.startswith(unset)}
    environment |= {
        "PYTHONPATH": path,
        "TESTING_MOCKED_DATALOADERS": "1",
        "HF_HUB_OFFLINE": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    if host == "lightning":
        known = {"no": "32-true", "bf16": "bf16-mixed"}
        environment["BF16_SCRIPT_PRECISION"] = known.get(precision, precision)
        environment |= {
            f"PL_TRAINER_LIMIT_{each}_BATCHES": "2" for each in ("VAL", "TEST", "PREDICT")
        }
    else:
        name = "BF16_MODE" if precision in MODES else "ACCELERATE_MIXED_PRECISION"
        environment[name] = precision
    return environment


def run(script: Script, sources: Path, precision: str, path: str) -> dict[str, Any]:
    """What a script left in one precision: losses, weights and optimizers, or how it failed."""
    named = script.fp32 if precision == "no" else script.bf16
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "record.json"
        command = [
            sys.executable,
            HERE / "script_runner.py",
            file,
            folder,
            script.most,
            script.host,
        ]
        try:
            done = subprocess.run(
                [*map(str, command), script.path, *script.options, *named],
                cwd=sources / script.host,
                env=variables(script.host, precision, path),
                capture_output=True,
                text=True,
                timeout=BOUND,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return {"failed": f"ran longer than {BOUND} s"}
        if done.returncode:
            return {"failed": "\n".join(done.stderr.strip().splitlines()[-5:])}
        found = json.loads(file.read_text())
        return found if found["losses"] else {"failed": "backward was never called"}


def faults(found: dict[str, dict[str, Any]]) -> list[str]:
    """What is not as in the other precisions."""
    fp32, stock = found["no"], found["bf16"]
    if "failed" in fp32:
        return []  # nothing of ours
    said = []
    for mode in MODES:
        its = found[mode]
        if "failed" in its:
            said.append(f"{mode} fails: {its['failed']}")
            continue
        if len(its["losses"]) != len(fp32["losses"]):
            said.append(f"{mode} took {len(its['losses'])} steps, fp32 {len(fp32['losses'])}")
        end, other = _end(its), _end(fp32)
        # Stock bf16 says how much rounding moves the end of such a run.
        allowed = 0.05 * abs(other) + 0.02
        if "failed" not in stock:
            allowed += 3 * abs(_end(stock) - other)
        if not abs(end - other) <= allowed:
            said.append(f"{mode} ends at {end:.4f}, fp32 at {other:.4f}")
        if "bfloat16" not in "".join(its["weights"]):
            said.append(f"{mode} trains {its['weights']}")
    return said


def _end(record: dict[str, Any]) -> float:
    losses = record["losses"]
    return fmean(losses[-max(1, len(losses) // 4) :])


def main() -> int:
    """Run what was asked for, print a row for each script, and compare."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("sources", type=Path)
    parser.add_argument("--only", default="", help="run those whose path holds this")
    parser.add_argument("--path", default=PATH, help="what scripts import from")
    parser.add_argument("--json", type=Path, help="write all that was found to this file")
    options = parser.parse_args()
    record, wrong = {}, 0
    for script in SCRIPTS:
        name = f"{script.host}/{script.path}"
        if options.only not in name or not (options.sources / script.host).is_dir():
            continue
        found = {each: run(script, options.sources, each, options.path) for each in PRECISIONS}
        record[name] = found
        print(name)
        for precision, its in found.items():
            told = its["failed"] if "failed" in its else _row(its)
            print(f"    {precision:17} {told}", flush=True)
        for each in faults(found):
            wrong += 1
            print(f"    DIFFERS: {each}", flush=True)
        if options.json:
            options.json.write_text(json.dumps(record, indent=1) + "\n")
    return int(wrong > 0)


def _row(its: dict[str, Any]) -> str:
    losses = f"{len(its['losses'])} losses, {its['losses'][0]:.4f} to {_end(its):.4f}"
    return f"{losses}; {', '.join(its['weights'])}; {', '.join(its['optimizers'])}"


if __name__ == "__main__":
    sys.exit(main())
