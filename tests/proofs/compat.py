"""`make compat`: the wheel in throw-away environments, from the oldest versions to the newest.

python tests/proofs/compat.py [NAME ...] [--keep FOLDER]

Builds sdist and wheel, installs the wheel into one new environment after the other, runs
`compat_smoke.py` there from outside the checkout, and writes the table of `docs/versions.md`. An
environment takes minutes, and gigabytes where the index has no torch for CPUs. A Python that is not
at hand (`python3.10` on the PATH, or pyenv's) is left as the table has it.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from compat_smoke import PARTS
from constraints import pinned

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "versions.md"
RECORD = ROOT / "examples" / "results" / "compat.json"
SMOKE = Path(__file__).with_name("compat_smoke.py")
START, END = "<!-- versions: written by make compat -->", "<!-- end of the versions -->"
SHOWN = ("python", "torch", "lightning", "accelerate", "transformers")


def torch_floor() -> str:
    """What `pyproject.toml` asks for, as the first release of it."""
    (floor,) = re.findall(r'"torch>=([\d.]+)"', (ROOT / "pyproject.toml").read_text())
    return floor if floor.count(".") == 2 else f"{floor}.0"


@dataclass(frozen=True)
class Environment:
    """One row.

    Attributes:
        name: of the row.
        python: such as "3.10".
        requirements: what is asked of pip beside the wheel; torch is installed first.
    """

    name: str
    python: str
    requirements: tuple[str, ...]


def environments() -> tuple[Environment, ...]:
    torch = f"torch=={pinned('torch')}"
    oldest = ("lightning==2.5.0", "accelerate==1.1.0", "transformers==4.51.3")
    hosts = ("lightning", "accelerate", "transformers")
    return (
        Environment("oldest of all", "3.10", (f"torch=={torch_floor()}", "numpy<2.3", *oldest)),
        Environment("oldest hosts", "3.11", (torch, *oldest)),
        Environment("pinned torch, oldest Python", "3.10", (torch, *hosts)),
        Environment("pinned torch", "3.11", (torch, *hosts)),
        Environment("core alone", "3.11", (torch,)),
        Environment("newest of all", "3.13", ("torch", *hosts)),
    )


def find_python(minor: str) -> str | None:
    """The interpreter of that version, from the PATH or from pyenv."""
    if found := shutil.which(f"python{minor}"):
        works = subprocess.run([found, "-m", "venv", "--help"], capture_output=True, check=False)
        if works.returncode == 0:
            return found
    root = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    candidates = sorted(root.glob(f"{minor}.*/bin/python"))
    return str(candidates[-1]) if candidates else None


def build(folder: Path) -> Path:
    """The wheel, made from the sdist, so that what is missing in the sdist is noticed."""
    command = [sys.executable, "-m", "build", "--outdir", str(folder), str(ROOT)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    (wheel,) = folder.glob("*.whl")
    return wheel


def try_in(environment: Environment, python: str, wheel: Path, folder: Path) -> dict:
    """Make the environment under ``folder`` and run the smoke test in it."""
    subprocess.run([python, "-m", "venv", str(folder / "venv")], check=True)
    own = folder / "venv" / "bin" / "python"
    pip = [str(own), "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    torch, *others = environment.requirements
    # torch goes first and alone, so that the index chooses the build that suits the machine.
    subprocess.run([*pip, torch], check=True)
    extras = "[cpu,safetensors]" if others else ""
    subprocess.run([*pip, torch, f"{wheel}{extras}", *others], check=True)
    outside = folder / "outside"
    outside.mkdir()
    # Nothing of the checkout or of this shell is to be seen there.
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "BF16", "TORCH"))}
    done = subprocess.run(
        [str(own), "-W", "ignore", str(SMOKE)],
        cwd=outside,
        env=clean,
        capture_output=True,
        text=True,
        timeout=1200,
        check=False,
    )
    if done.returncode or not done.stdout.strip():
        return {"versions": {}, "parts": {"start": done.stderr.strip()[-400:]}}
    sys.stderr.write(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def table(record: dict[str, dict]) -> str:
    """The rows as Markdown, in the order of the environments."""
    lines = [f"| | {' | '.join((*SHOWN, *PARTS, 'tried on'))} |"]
    lines.append("|" + "---|" * (len(SHOWN) + len(PARTS) + 2))
    marks = {"ok": "yes", "not installed": "-"}
    for environment in environments():
        if found := record.get(environment.name):
            versions = [found["versions"].get(each) or "-" for each in SHOWN]
            outcomes = [found["parts"].get(part, "-") for part in PARTS]
            cells = [marks.get(each, f"**no**: {each}").replace("|", "/") for each in outcomes]
            lines.append(f"| {' | '.join((environment.name, *versions, *cells, found['date']))} |")
    return "\n".join(lines)


def write(record: dict[str, dict], page: Path = PAGE) -> None:
    """Put the table between the page's marks."""
    text = page.read_text()
    before, after = text.split(START)[0], text.split(END)[1]
    page.write_text(f"{before}{START}\n\n{table(record)}\n\n{END}{after}")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    names = [environment.name for environment in environments()]
    parser.add_argument("names", nargs="*", metavar="NAME", help="; ".join(names))
    parser.add_argument("--keep", type=Path, help="a folder that the environments stay in")
    args = parser.parse_args(arguments)
    if unknown := set(args.names) - set(names):
        parser.error(f"no environment is called {', '.join(unknown)}; there are {', '.join(names)}")
    failed = False
    with tempfile.TemporaryDirectory() as temporary:
        base = args.keep or Path(temporary)
        wheel = build(base / "dist")
        for number, environment in enumerate(environments()):
            if args.names and environment.name not in args.names:
                continue
            if (python := find_python(environment.python)) is None:
                print(f"{environment.name}: Python {environment.python} is not at hand", flush=True)
                continue
            folder = base / str(number)
            folder.mkdir()
            try:
                found = try_in(environment, python, wheel, folder)
            except subprocess.CalledProcessError as error:
                found = {"versions": {}, "parts": {"plain PyTorch": f"{error.cmd[-1]}: {error}"}}
            found["date"] = datetime.date.today().isoformat()
            failed |= any(each not in ("ok", "not installed") for each in found["parts"].values())
            print(environment.name, json.dumps(found), flush=True)
            # Read anew: rows of a run beside this one are kept.
            record = json.loads(RECORD.read_text()) | {environment.name: found}
            RECORD.write_text(json.dumps(record, indent=1) + "\n")
            if not args.keep:
                shutil.rmtree(folder)
    write(json.loads(RECORD.read_text()))
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main())
