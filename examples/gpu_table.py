"""The README's tables of GPUs, from the records in examples/results: python examples/gpu_table.py.

One table for each GPU, of its newest record: the rows of its benchmarks and of its selftest.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "examples" / "results"
BEGIN, END = (
    "<!-- gpu table: written by examples/gpu_table.py -->",
    "<!-- end of the gpu table -->",
)
# As in torch_bf16.tools.bench, which needs torch.
BASELINE = "torch fused fp32"
WAYS = ("moved", "graph", "zero-rows")


def tables(results: Path) -> str:
    """Return a table for each GPU that was measured."""
    nothing = "No GPU has been measured yet: `make gpu` measures one and writes this table."
    return "\n\n".join(_table(*each) for each in newest(results).values()) or nothing


def newest(results: Path) -> dict[str, tuple[Path, list[dict[str, Any]]]]:
    """Return the folder and the records of each GPU's newest measurement, the newest GPU first."""
    found = ((folder, [*records_in(folder)]) for folder in filter(Path.is_dir, results.iterdir()))
    measured = [(folder, records) for folder, records in found if records]
    measured.sort(key=lambda each: each[1][0]["date"], reverse=True)
    by_gpu: dict[str, tuple[Path, list[dict[str, Any]]]] = {}
    for folder, records in measured:
        by_gpu.setdefault(records[0]["hardware"]["device"], (folder, records))
    return by_gpu


def records_in(folder: Path) -> Iterator[dict[str, Any]]:
    """The records of AdamW's steps on a GPU in a folder: benchmarks, then a selftest that passed.

    Of a row that several of them have, the first counts. By stem, because that of a part such as
    `-heavyball`, which has fewer rounds, comes after that of its model. Steps with states in host
    memory are left out: they take as long as the bus does.
    """
    found = []
    for file in sorted(folder.glob("bench-*.json"), key=lambda file: file.stem):
        if not file.stem.endswith("-offload"):
            found.append(_read(file))
    selftest = _read(folder / "selftest.json")
    if selftest.get("passed"):
        found += selftest["speed"]
    for record in found:
        on_gpu = record.get("device_type") == "cuda"
        if on_gpu and record["rules"] == "AdamW" and record["baseline"] == BASELINE:
            yield record


def _read(file: Path) -> dict[str, Any]:
    try:
        return json.loads(file.read_text())
    except FileNotFoundError:
        return {}
    except ValueError as error:
        # Of a part that was ended while it wrote.
        print(f"{file} is left out: {error}", file=sys.stderr)
        return {}


def rows_of(records: Iterable[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the row of each optimizer for each model; other ways to step are left out."""
    rows: dict[str, dict[str, Any]] = {}
    for record in records:
        for row in record["results"]:
            if row["name"].rpartition(", ")[2] not in WAYS:
                rows.setdefault(row["name"], {}).setdefault(record["model"], row)
    return rows


def _table(folder: Path, records: list[dict[str, Any]]) -> str:
    """A row for each optimizer, the fastest first."""
    models, rows = list(dict.fromkeys(record["model"] for record in records)), rows_of(records)
    device = records[0]["hardware"]["device"] or "GPU"
    head = [f"AdamW: [{device}](examples/results/{folder.name})"]
    for model in models:
        head += [f"{model}, ms", "to torch fused"]

    def times(name: str) -> list[float]:
        of_models = (rows[name].get(model) for model in models)
        return [row["ms"]["median"] if row else math.inf for row in of_models]

    lines = [f"| {' | '.join([*head, 'bytes each'])} |", "|---" + "|---:" * len(head) + "|"]
    for name in sorted(rows, key=times):
        cells = [name]
        for model in models:
            row = rows[name].get(model)
            cells += map(_three_digits, (row["ms"], row["ratio"])) if row else ("-", "-")
        first = next(iter(rows[name].values()))
        lines.append(f"| {' | '.join([*cells, format(first['bytes_per_parameter'], '.2f')])} |")
    return "\n".join(lines)


def _three_digits(times: Mapping[str, float]) -> str:
    value = times["median"]
    return f"{value:.0f}" if value >= 99.95 else f"{value:#.3g}"


def written_into(readme: str, lines: str) -> str:
    """Return the README with other tables between the two marks.

    Raises:
        ValueError: the marks are not there exactly once each and in this order.
    """
    before, mark, rest = readme.partition(BEGIN)
    _, other, after = rest.partition(END)
    if not mark or not other or BEGIN in after or END in after:
        raise ValueError(f"README.md must have {BEGIN!r} once and {END!r} once after it")
    return f"{before}{BEGIN}\n\n{lines}\n\n{END}{after}"


def main() -> None:
    """Write the tables into the README."""
    readme = ROOT / "README.md"
    readme.write_text(written_into(readme.read_text(), tables(RESULTS)))
    print("README.md: the table of GPUs is written")


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    main()
