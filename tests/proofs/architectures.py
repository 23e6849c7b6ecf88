"""Do the architectures of transformers learn in both modes what they learn in fp32?

    python tests/proofs/architectures.py --record record.jsonl
    python tests/proofs/architectures.py gpt2 mamba resnet

A tiny model of each architecture, untrained, takes six steps of AdamW on one batch: in fp32, under
stock autocast and in both modes, by one thread on a CPU. `tiny_configs.py` and `tiny_batches.py`
find a configuration and a batch. An architecture for which they find none is passed over, and so is
one that takes a sixth of the time for all ways in fp32 alone. Each runs in a process of its own.
The record gets a line for each, and the same command goes on where it was interrupted; the whole
takes some 20 minutes.

A mode disagrees if a loss is further from fp32's than 0.5 % of fp32's largest and than four times
the distance of stock torch: under autocast, or from weights rounded to bf16, in fp32 or under
autocast. It also does if it fails where fp32 does not, warns, recasts a buffer, or does not move a
parameter that fp32 and autocast move; and if a model that lists parts to be kept in fp32 keeps
other parameters than transformers does where it loads the model in bf16. Printed are what disagrees
and the medians of the largest deviations. Exits with 1 if anything disagrees.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import resource
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

import torch
import transformers
from tiny_training import (
    LEARNING_RATE,
    MODES,
    ROUNDED,
    WAYS,
    architectures,
    kept_in_fp32,
    train,
    trainable,
)

from torch_bf16.tools.output import print_table

TOLERANCE, TIMES, LARGE = 0.005, 4, 0.01
MOVED = LEARNING_RATE  # one element, in one step
NOISE = ("autocast", *ROUNDED)
Row = dict[str, Any]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", help="folders of transformers.models (default: all)")
    parser.add_argument("--record", type=Path, help="JSON lines, written and continued")
    parser.add_argument("--seconds", type=int, default=60, help="CPU time of each (default: 60)")
    options = parser.parse_args(arguments)
    names = options.names or architectures()
    if unknown := sorted({*names} - {*architectures()}):
        parser.error(f"transformers {transformers.__version__} has no {', '.join(unknown)}")
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    rows = read(options.record)
    for name in names:
        if name not in rows:
            rows[name] = bounded(name, options.seconds)
            if options.record:
                with options.record.open("a") as file:
                    file.write(json.dumps(rows[name]) + "\n")
    return report([rows[name] for name in names])


def read(record: Path | None) -> dict[str, Row]:
    """What an earlier run of this version of transformers found."""
    if record is None or not record.exists():
        return {}
    rows = map(json.loads, record.read_text().splitlines())
    return {row["name"]: row for row in rows if row["transformers"] == transformers.__version__}


def bounded(name: str, seconds: int) -> Row:
    """What ``stages`` found in a fork, which is killed when its time is up."""
    fork = multiprocessing.get_context("fork")  # transformers is imported once
    receiver, sender = fork.Pipe(duplex=False)
    process = fork.Process(target=_send, args=(sender, name, seconds))
    process.start()
    sender.close()
    late = f"more than {seconds} s, or a crash"
    row: Row = {"passed over": late}
    with suppress(EOFError):
        while True:
            row = receiver.recv()
    process.join()
    if "fp32" in row:
        row = {way: {"failed": late} for way in WAYS} | row
    return {"name": name, "transformers": transformers.__version__} | row


def _send(sender: Connection, name: str, seconds: int) -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    signal.alarm(10 * seconds)  # it may wait, too
    os.environ["HF_HUB_OFFLINE"] = "1"
    for row in stages(name, seconds):
        sender.send(row)


def stages(name: str, seconds: float = math.inf) -> Iterator[Row]:
    """What one architecture did, after each way."""
    start = time.process_time()
    try:
        case = trainable(name)
    except Exception as error:
        yield {"passed over": str(error)[:2000]}
        return
    row: Row = {"class": case.model_class.__name__, "has loss": case.has_loss}
    expected = attempted(lambda: train(case, "fp32"))
    if "failed" in expected or not all(map(math.isfinite, expected["losses"])):
        yield {"passed over": expected.get("failed", "fp32 diverges")}
        return
    if time.process_time() - start > seconds / 6:  # so that the others have enough
        yield {"passed over": "slow in fp32"}
        return
    row["fp32"] = expected
    for way in WAYS[1:]:
        row[way] = attempted(lambda way=way: train(case, way))
        yield row
    if any(far(row, mode) for mode in MODES):
        for way in ROUNDED:
            row[way] = attempted(lambda way=way: train(case, way))
        yield row
    if declared := getattr(case.model(), "_keep_in_fp32_modules_strict", None):
        row["declared"] = sorted(declared)
        row["kept"] = attempted(lambda: kept_in_fp32(case))
        yield row


def attempted(function: Any) -> Row:
    try:
        return function()
    except Exception as error:
        return {"failed": f"{type(error).__name__}: {error}"[:500]}


def deviation(row: Row, way: str) -> float:
    """The largest distance of a loss from fp32's, as a share of fp32's largest."""
    found, expected = row.get(way, {}), row["fp32"]["losses"]
    if "failed" in found or not found:
        return 0.0
    largest = max(map(abs, expected))
    distances = [abs(a - b) for a, b in zip(found["losses"], expected, strict=True)]
    return max(each if math.isfinite(each) else math.inf for each in distances) / largest


def far(row: Row, mode: str) -> bool:
    """Whether a mode's losses are further from fp32's than what is known to be noise."""
    noise = [deviation(row, way) for way in NOISE]
    most = max((each for each in noise if each < math.inf), default=0.0)
    return deviation(row, mode) > max(TOLERANCE, TIMES * most)


def explained(row: Row) -> bool:
    """Whether only weights rounded to bf16 show that a mode's distance is noise."""
    return ROUNDED[0] in row and not any(far(row, mode) for mode in MODES)


def disagreements(row: Row) -> list[str]:
    """What a mode did and fp32 or transformers did not."""
    found = []
    for mode in MODES:
        if "failed" in row[mode]:
            found.append(f"{mode} failed: {row[mode]['failed']}")
            continue
        if far(row, mode):
            others = [f"{way} {deviation(row, way):.2%}" for way in NOISE]
            found.append(f"{mode} is off by {deviation(row, mode):.2%}; {', '.join(others)}")
        moved, moves = row[mode]["moved"], row["fp32"]["moved"]
        # Some gradients are 0 but for rounding: those of the biases of keys, before a softmax.
        also = row["autocast"].get("moved", moves)
        if still := [n for n in moves if min(moves[n], also[n]) > MOVED and not moved[n]]:
            count = f"{len(still)} of {len(moves)}"
            found.append(f"{mode} left {count} parameters where they were: {still[0]}")
        if row[mode]["recast"]:
            found.append(f"{mode} recast buffers: {row[mode]['recast'][0]}")
        if row[mode]["warned"]:
            found.append(f"{mode} warned: {row[mode]['warned'][0]}")
        if row[mode]["evaluated"] is None and row["fp32"]["evaluated"] is not None:
            found.append(f"{mode} could not be evaluated")
    kept = row.get("kept", {})
    if "failed" not in kept and kept.get("ours") != kept.get("theirs"):
        differ = {*kept["ours"]} ^ {*kept["theirs"]}
        found.append(f"{len(differ)} parameters kept in fp32 by one alone: {min(differ)}")
    return found


def report(rows: list[Row]) -> int:
    """Prints what was found; 1 if anything disagrees."""
    trained = [row for row in rows if "passed over" not in row]
    wrong = [[row["name"], row["class"], each] for row in trained for each in disagreements(row)]
    if wrong:
        print_table("What disagrees", ["architecture", "class", "what"], wrong)
    without = sum(not row["has loss"] for row in trained)
    print(
        f"architectures of transformers {transformers.__version__}: {len(trained)} trained, "
        f"{without} of them by a stand-in for a loss, {len(rows) - len(trained)} passed over; "
        f"{len(trained) - len({name for name, *_ in wrong})} agree with fp32"
    )
    for way in WAYS[1:]:
        ran = [row for row in trained if "failed" not in row[way]]
        if ran:
            middle = median(deviation(row, way) for row in ran)
            large = [row["name"] for row in ran if deviation(row, way) > LARGE]
            print(
                f"{way}: median of the largest deviations {middle:.3%}; above 1 %: {names(large)}"
            )
    print("autocast alone failed:", names(r["name"] for r in trained if "failed" in r["autocast"]))
    print("rounded weights explain:", names(r["name"] for r in trained if explained(r)))
    kept = [row["name"] for row in trained if row.get("kept", {}).get("ours")]
    print(
        f"lists of what stays in fp32: {sum('declared' in r for r in trained)}; met: {names(kept)}"
    )
    return int(bool(wrong))


def names(found: Any) -> str:
    return ", ".join(found) or "none"


if __name__ == "__main__":
    sys.exit(main())
