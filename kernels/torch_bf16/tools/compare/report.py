"""Print the record of a comparison in a terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch_bf16.tools.output import number, print_sentences, print_table, share

from .verdict import decimals_of

__all__ = ["interval", "show", "summary"]

_COLUMNS = ("difference", "95 % interval", "kept (worst layer)", "never moved", "bytes", "ms")


def summary(found: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """The table of all rows: headings and cells, without columns in which nothing is known."""
    columns = ("", found["measure"], *_COLUMNS)
    rows = [_cells(each, found) for each in found["rows"]]
    known = [n for n in range(len(columns)) if any(row[n] not in ("", "-") for row in rows)]
    return [columns[n] for n in known], [[row[n] for n in known] for row in rows]


def show(found: Mapping[str, Any]) -> None:
    """Print a record."""
    last = f"steps {found['first_step']:,} to {found['last_step']:,}"
    measure = f"{found['measure']}, mean of the last {found['final_over']} of them"
    columns, rows = summary(found)
    print_table(f"{found['what']}: {last}; {measure}", columns, rows)
    print_sentences(found["sentences"], found["notes"])


def _cells(row: Mapping[str, Any], found: Mapping[str, Any]) -> Sequence[str]:
    against, digits = row["against"], decimals_of(found)
    has_interval = against is not None and against["low"] is not None
    size, ms = row["bytes"], row["ms"]
    return (
        row["name"],
        "no number" if row["final"] is None else f"{row['final']:.{digits}f}",
        "" if row["name"] == found["reference"] else _difference(against, digits),
        interval(against, digits) if against and has_interval else "",
        _kept_cell(row),
        share(row["unmoved"]),
        f"{sum(size.values()):.2f}" if size else "-",
        f"{number(ms['p50'])} ({number(ms['p10'])} to {number(ms['p90'])})" if ms else "-",
    )


def interval(against: Mapping[str, float], digits: int) -> str:
    """Format the 95 % interval of a difference."""
    return f"{against['low']:+.{digits}f} to {against['high']:+.{digits}f}"


def _difference(against: Mapping[str, float] | None, digits: int) -> str:
    # Plus 0.0: a negative number that is rounded to nothing has no sign.
    return "-" if against is None else f"{round(against['mean'], digits) + 0.0:+.{digits}f}"


def _kept_cell(row: Mapping[str, Any]) -> str:
    known = [each["survived"] for each in row["layers"].values() if each["survived"] is not None]
    return f"{share(row['survived'])} ({share(min(known))})" if known else "-"
