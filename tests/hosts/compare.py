"""The hosts' own test suites beside our package, and in our modes, outcome by outcome.

    python tests/hosts/compare.py SOURCES --suites lightning,fabric,accelerate

SOURCES holds the sources of each host at the version that is installed, in folders of their names
(``git clone``, or the source distribution where it has tests). Each suite runs with our hook
switched off, with it on, and with each mode forced on all that asks for no precision. A test that
ends otherwise than with the hook off is run again alone, both ways; what still differs must be in
`known.py`, with its reason. Exits with 1 where it is not.

What the suites import is installed into a folder that is thrown away, beside a build of this
package; ``--with lightning==2.5.0`` puts another version of a host there. ``--keep FOLDER --seconds
500`` takes it in pieces: it stops then, with 75, and the same command goes on from there.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path

import known
from suite_plugin import read
from suites import SUITES, Suite

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
BASE, MODES = "off", ("bf16-stochastic", "bf16-fp32-master")
WAYS = ("on", *MODES)
# A test that waits for another process, and one whose process dies, must not end the comparison.
BOUND, LIVES = 150, 20
UNFINISHED = 75  # EX_TEMPFAIL

Outcomes = dict[str, tuple[str, str]]


def install(folder: Path, requirements: Iterable[str]) -> None:
    """Install packages without what they depend on, which would bring another torch along."""
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder)]
    subprocess.run([*pip, *requirements], check=True)


def variables(
    way: str,
    host: str,
    outcomes: Path,
    path: Iterable[Path | str],
    until: float | None = None,
) -> dict[str, str]:
    """The environment of one way to run the suite of a host."""
    unset = ("ACCELERATE_", "BF16_", "PL_", "LT_")
    found = {k: v for k, v in os.environ.items() if not k.startswith(unset)}
    found["PYTHONPATH"] = os.pathsep.join(map(str, path))
    found["BF16_SUITE_OUTCOMES"] = str(outcomes)
    if until is not None:
        found["BF16_SUITE_UNTIL"] = str(until)
    if way == BASE:
        found["BF16_AUTOLOAD"] = "0"
    elif way in MODES:
        # Our plugin of pytest, for Lightning; BF16_MODE would refuse other precisions by name.
        found["BF16_SUITE_MODE" if host == "lightning" else "BF16_MODE"] = way
    return found


class Runs:
    """Runs of a suite whose outcomes stay in a folder, where a run that was stopped goes on.

    Args:
        suite: the suite.
        sources: folder with the sources of the hosts.
        path: what the tests import from, before all else.
        folder: where outcomes are.
        until: when to stop, as ``time.time()`` counts; None for never.
    """

    def __init__(
        self,
        suite: Suite,
        sources: Path,
        path: Iterable[Path | str],
        folder: Path,
        until: float | None = None,
    ) -> None:
        self.suite, self.cwd, self.folder = suite, sources / suite.folder, folder
        self.path, self.until = [*path, HERE], until
        folder.mkdir(parents=True, exist_ok=True)

    def run(self, way: str, tests: Iterable[str] = (), label: str = "") -> Outcomes:
        """How tests end, by default all of the suite; one in which the process dies ``died``."""
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
        # Names of tests are relative to the suite's folder, and no checkout's settings count.
        command += ["-c", os.devnull, "--rootdir", ".", f"--timeout={BOUND}"]
        command += ["-p", "suite_plugin", "--continue-on-collection-errors"]
        command += list(tests) or ["-k", self.suite.selected, *self.suite.tests]
        outcomes, log = (self.folder / f"{way}{label}.{kind}" for kind in ("jsonl", "log"))
        environment = variables(way, self.suite.host, outcomes, self.path, self.until)
        for _ in range(LIVES):
            if self.until is not None and time.time() > self.until:
                sys.exit(UNFINISHED)
            with log.open("a") as out:
                ended = subprocess.run(
                    command, cwd=self.cwd, env=environment, stdout=out, stderr=out
                )
            if ended.returncode in (0, 1, 5):  # 5: none is left
                return read(outcomes)
        raise SystemExit(log.read_text()[-3000:])


def differing(base: Outcomes, other: Outcomes) -> list[str]:
    """Tests that end otherwise, in the order of the first run."""
    absent = ("absent", "")
    names = dict.fromkeys([*base, *other])
    return [n for n in names if base.get(n, absent)[0] != other.get(n, absent)[0]]


def reason_of(name: str, reasons: Mapping[str, Iterable[str]]) -> str | None:
    """Why a test may differ: it, its function, class, file or folder is in the list."""
    for reason, tests in reasons.items():
        for test in tests:
            if name == test or name.startswith((f"{test}[", f"{test}::", f"{test}/")):
                return reason
    return None


def compare(
    runs: Runs, reasons: Mapping[str, Iterable[str]], ways: Iterable[str]
) -> dict[str, dict]:
    """For each way its counts, and the tests that differ, with their reasons or without."""
    base = runs.run(BASE)
    found: dict[str, dict] = {BASE: {"counts": counts(base)}}
    for way in ways:
        other = runs.run(way)
        names = differing(base, other)
        if again := [n for n in names if n in base and n in other]:
            twice = [runs.run(each, again, f"-again-{way}") for each in (BASE, way)]
            steady = set(names) - set(again) | set(differing(*twice))
            names = [n for n in names if n in steady]
        found[way] = {
            "counts": counts(other),
            "known": {n: r for n in names if (r := reason_of(n, reasons))},
            "new": {
                n: [base.get(n, ("absent",))[0], *other.get(n, ("absent", ""))]
                for n in names
                if not reason_of(n, reasons)
            },
        }
    return found


def counts(outcomes: Outcomes) -> dict[str, int]:
    return dict(sorted(Counter(outcome for outcome, _ in outcomes.values()).items()))


def report(name: str, found: dict[str, dict], reasons: Mapping[str, Iterable[str]]) -> bool:
    """Print what differs; True where all of it is known."""
    right = True
    for way, each in found.items():
        told = ", ".join(f"{count} {outcome}" for outcome, count in each["counts"].items())
        print(f"{name}, {way}: {told}")
        if way == BASE:
            continue
        print(f"  {len(each['known'])} known differences, {len(each['new'])} new")
        for test, (before, after, said) in each["new"].items():
            right = False
            print(f"  {test}\n    {before} -> {after}  {said}")
    seen = {reason for way in found.values() for reason in way.get("known", {}).values()}
    if stale := [reason for reason in reasons if reason not in seen]:
        print(f"  {name}: no longer seen: " + "; ".join(stale))
    return right


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("sources", type=Path, help="folder with the sources of the hosts")
    parser.add_argument("--suites", default="lightning,fabric,accelerate", help="comma-separated")
    parser.add_argument("--ways", default=",".join(WAYS), help="comma-separated")
    parser.add_argument("--with", dest="extra", nargs="*", default=[], help="requirements for pip")
    parser.add_argument("--keep", type=Path, help="folder that keeps packages and outcomes")
    parser.add_argument("--seconds", type=float, help="stop then; with --keep, go on another time")
    parser.add_argument("--record", type=Path, help="write what was found, as JSON")
    options = parser.parse_args()
    suites = {name: SUITES[name] for name in options.suites.split(",")}
    until = None if options.seconds is None else time.time() + options.seconds
    record, right = {}, True
    with tempfile.TemporaryDirectory() as folder:
        kept = options.keep.absolute() if options.keep else Path(folder)
        target = kept / "packages"
        if not target.exists():
            needs = {need for suite in suites.values() for need in suite.needs}
            install(target, [str(ROOT), *sorted(needs), *options.extra])
        for name, suite in suites.items():
            reasons = known.DIFFERENCES.get(name, {})
            runs = Runs(suite, options.sources.absolute(), [target], kept / name, until)
            found = compare(runs, reasons, options.ways.split(","))
            right = report(name, found, reasons) and right
            version = _version(suite.host, target)
            record[name] = {"version": version, "torch": _version("torch", target), **found}
    if options.record:
        options.record.write_text(json.dumps(record, indent=1) + "\n")
    return int(not right)


def _version(distribution: str, target: Path) -> str:
    places = importlib.metadata.distributions(name=distribution, path=[str(target), *sys.path])
    return next(iter(places)).version


if __name__ == "__main__":
    sys.exit(main())
