"""Kills at random moments of saving runs, and files with random damage.

    python tests/proofs/faults.py kills --count 200
    python tests/proofs/faults.py corrupt --count 1000

Both print a line of counts and exit with 1 where a run was lost or a damaged file loaded.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import sys
import tempfile
import time
import zlib
from collections import Counter
from pathlib import Path

import torch

import torch_bf16

STEPS = 400


def make_run():
    """A small model with an exact master and its optimizer; gradients follow from the step."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 96), torch.nn.LayerNorm(96))
    torch_bf16.cast_model(model, "bf16-fp32-master")
    # Steps run in forked children, where a pool of threads would be missing.
    options = {"recipe": "bf16-fp32-master", "backend": "eager"}
    return model, torch_bf16.AdamW(model.parameters(), lr=1e-3, **options)


def train_step(model, optimizer, step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
    optimizer.step()


def digest(model, optimizer) -> int:
    """A CRC of every weight and state, so that two runs can be compared bit for bit."""
    tensors = [p.detach() for p in model.parameters()]
    tensors += [t for p in model.parameters() for t in optimizer.state[p].values()]
    total = 0
    for tensor in tensors:
        total = zlib.crc32(tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes(), total)
    return total


def train_on(path: Path) -> None:
    """Resume where there is a checkpoint, and save after every step until killed."""
    model, optimizer = make_run()
    start = 0
    if path.exists():
        start = torch_bf16.load_checkpoint(path, model=model, optimizer=optimizer)["step"]
    for step in range(start + 1, STEPS + 1):
        train_step(model, optimizer, step)
        torch_bf16.save_checkpoint(path, model=model, optimizer=optimizer, step=step)


def kill_at_random(path: Path, count: int, seed: int = 0) -> Counter:
    """Kill a saving run ``count`` times; each goes on from what the last one left.

    Returns:
        ``killed``; ``saves`` (steps that were saved); ``failed`` (children that ended by
        themselves in an error); ``lost`` (a file that was there is gone or does not load);
        ``wrong`` (what loads is not the uninterrupted run at that step); ``partial`` (a
        half-written file was left).
    """
    model, optimizer = make_run()
    expected = []
    for step in range(1, STEPS + 1):
        train_step(model, optimizer, step)
        expected.append(digest(model, optimizer))
    # On a busy machine a child gets as far as its saves only if it has time for some.
    start = time.perf_counter()
    model, optimizer = make_run()
    for step in (1, 2):
        train_step(model, optimizer, step)
        torch_bf16.save_checkpoint(path.with_suffix(".paced"), model=model, optimizer=optimizer)
    longest = max(0.25, 2 * (time.perf_counter() - start))
    rng, counts, reached = random.Random(seed), Counter(lost=0, wrong=0), 0
    while counts["killed"] < count:
        child = os.fork()
        if child == 0:
            status = 1
            try:
                train_on(path)
                status = 0
            finally:
                os._exit(status)
        time.sleep(rng.uniform(0.0, longest))
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        counts["failed"] += os.WIFEXITED(status) and os.WEXITSTATUS(status)
        counts["killed"] += 1
        counts["partial"] += path.with_name(f".{path.name}.partial").exists()
        model, optimizer = make_run()
        try:
            step = torch_bf16.load_checkpoint(path, model=model, optimizer=optimizer)["step"]
        except Exception as error:
            if reached or not isinstance(error, FileNotFoundError):
                counts["lost"] += 1
                print(f"after kill {counts['killed']}: {error}", file=sys.stderr)
            continue
        counts["saves"] += max(step - reached, 0)
        counts["wrong"] += step < reached or digest(model, optimizer) != expected[step - 1]
        reached = step
        if step == STEPS:
            reached = 0
            path.unlink()
    return counts


def damage(data: bytes, rng: random.Random) -> tuple[str, bytes]:
    """One kind of damage, at a random place."""
    kind = rng.choice(["bit", "bits", "cut", "zeroed", "swapped", "grown", "byte"])
    changed, at = bytearray(data), rng.randrange(len(data))
    if kind == "bit":
        changed[at] ^= 1 << rng.randrange(8)
    elif kind == "bits":
        for _ in range(rng.randrange(2, 20)):
            changed[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    elif kind == "cut":
        del changed[at:]
    elif kind == "zeroed":
        size = min(rng.choice([1, 512, 4096]), len(data) - at)
        changed[at : at + size] = bytes(size)
    elif kind == "swapped":
        at, size = rng.randrange(0, len(data) - 1024), 512
        changed[at : at + 2 * size] = data[at + size : at + 2 * size] + data[at : at + size]
    elif kind == "grown":
        changed[at:at] = rng.randbytes(rng.randrange(1, 64))
    else:
        changed[at] = rng.randrange(256)
    return kind, bytes(changed)


def corrupt_at_random(folder: Path, count: int, seed: int = 0) -> Counter:
    """Load ``count`` damaged copies of one checkpoint, which must be refused or change nothing.

    Returns:
        ``refused``; ``harmless`` (loaded with every bit: bytes that mean nothing were damaged);
        ``silent`` (loaded as something else); ``changed`` (refused, but something in memory moved);
        ``torch silent`` (what ``torch.load`` alone takes, and reads as something else).
    """
    path, whole = folder / "damaged.pt", folder / "whole.pt"
    model, optimizer = make_run()
    train_step(model, optimizer, 1)
    torch_bf16.save_checkpoint(whole, model=model, optimizer=optimizer, step=1)
    content, saved = torch.load(whole, weights_only=True), digest(model, optimizer)
    data, rng, counts = whole.read_bytes(), random.Random(seed), Counter(silent=0, changed=0)
    train_step(model, optimizer, 2)
    before = digest(model, optimizer)
    for _ in range(count):
        kind, changed = damage(data, rng)
        while changed == data:
            kind, changed = damage(data, rng)
        path.write_bytes(changed)
        try:
            rest = torch_bf16.load_checkpoint(path, model=model, optimizer=optimizer)
        except torch_bf16.CheckpointError as error:
            counts["refused"] += str(path) in str(error)
            counts["changed"] += digest(model, optimizer) != before
        else:
            if rest == {"step": 1} and digest(model, optimizer) == saved:
                counts["harmless"] += 1
            else:
                counts["silent"] += 1
                print(f"a file with {kind} damaged loaded as something else", file=sys.stderr)
            train_step(model, optimizer, 2)
        with contextlib.suppress(Exception):
            counts["torch silent"] += not same(torch.load(path, weights_only=True), content)
    return counts


def same(one, other) -> bool:
    """Whether two contents of files are equal in every bit."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        bits = (each.contiguous().flatten().view(torch.uint8) for each in (one, other))
        return (one.dtype, one.shape) == (other.dtype, other.shape) and torch.equal(*bits)
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return type(one) is type(other) and one == other


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("what", choices=["kills", "corrupt"])
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        if options.what == "kills":
            counts = kill_at_random(Path(folder) / "run.pt", options.count, options.seed)
            bad = counts["lost"] + counts["wrong"] + counts["failed"] + (not counts["saves"])
        else:
            counts = corrupt_at_random(Path(folder), options.count, options.seed)
            bad = counts["silent"] + counts["changed"]
    print(", ".join(f"{name}: {number}" for name, number in counts.items()))
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
