"""Print the record of a comparison in a terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch_bf16.tools.output import number, print_sentences, print_table, share

__all__ = ["difference", "show", "summary"]

_COLUMNS = (
    "",
    "loss",
    "difference",
    "95 % interval",
    "kept (worst layer)",
    "never moved",
    "bytes",
    "ms",
)


def summary(found: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """The table of all rows: headings and cells, without columns in which nothing is known."""
    rows = [_cells(each, found["reference"]) for each in found["rows"]]
    known = [n for n in range(len(_COLUMNS)) if any(row[n] not in ("", "-") for row in rows)]
    return [_COLUMNS[n] for n in known], [[row[n] for n in known] for row in rows]


def show(found: Mapping[str, Any]) -> None:
    """Print a record."""
    last = f"steps {found['first_step']:,} to {found['last_step']:,}"
    measure = f"{found['measure']}, mean of the last {found['final_over']} of them"
    columns, rows = summary(found)
    print_table(f"{found['what']}: {last}; {measure}", columns, rows)
    print_sentences(found["sentences"], found["notes"])


def _cells(row: Mapping[str, Any], reference: str) -> Sequence[str]:
    against = row["against"]
    has_interval = against is not None and against["low"] is not None
    size, ms = row["bytes"], row["ms"]
    return (
        row["name"],
        "no number" if row["final"] is None else f"{row['final']:.4f}",
        "" if row["name"] == reference else difference(against and against["mean"]),
        f"{against['low']:+.4f} to {against['high']:+.4f}" if against and has_interval else "",
        _kept_cell(row),
        share(row["unmoved"]),
        f"{sum(size.values()):.2f}" if size else "-",
        f"{number(ms['p50'])} ({number(ms['p10'])} to {number(ms['p90'])})" if ms else "-",
    )


def difference(value: float | None) -> str:
    """Format a difference with its sign."""
    # Plus 0.0: a negative number that is rounded to nothing has no sign.
    return "-" if value is None else f"{round(value, 4) + 0.0:+.4f}"


def _kept_cell(row: Mapping[str, Any]) -> str:
    known = [each["survived"] for each in row["layers"].values() if each["survived"] is not None]
    return f"{share(row['survived'])} ({share(min(known))})" if known else "-"
