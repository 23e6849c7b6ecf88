"""The table of a run, made from its record."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch_bf16.tools.output import number

__all__ = ["aligned", "bracket", "table"]

_COLUMNS = (
    *("ms per step", "ratio", "after product", "per byte", "ns/elem", "moved", "GB/s", "of copy"),
    *("host ms", "launches", "held", "peak"),
)

_LEGEND = """\
ms per step, ratio: medians, in brackets the 10th and 90th percentile of the rounds; ratio: to the
time of {baseline!r} in the same round; after product: the ratio of steps right after one of torch's
matrix products, as in a training loop; per byte: the ratio of times per byte moved. moved: bytes
per parameter that a step must read and write (gradients read, weights and states read and written,
once each). GB/s: moved over time, which is less than what really went through memory if there were
temporaries. of copy: GB/s as a share of a device copy in the same rounds. host ms: until the call
returns. held, peak: bytes per parameter of weights, gradients and states, as allocated, and at the
peak."""


def table(record: Mapping[str, Any]) -> str:
    """Format a record for people, as plain text."""
    rows = record["results"]
    lines = [_heading(record), ""]
    lines += aligned({"": _COLUMNS, **{row["name"]: _cells(row) for row in rows}})
    copy = record["copy_gb_per_second"]
    lines += ["", f"device copy: {bracket(copy)} GB/s, read and written"]
    storing: dict[str, list[str]] = {}
    for row in rows:
        storing.setdefault(row["stores"], []).append(row["name"])
    lines += [f"{', '.join(names)}: {stores}" for stores, names in storing.items()]
    lines += [f"failed: {name}: {why}" for name, why in record["failed"].items()]
    lines += [f"missing: {name} (pip install -U {pip})" for name, pip in record["missing"].items()]
    lines += [f"note: {note}" for note in record["notes"]]
    return "\n".join([*lines, "", _LEGEND.format(baseline=record["baseline"])])


def aligned(rows: Mapping[str, Sequence[str]]) -> list[str]:
    """Lines of a table, the names of its rows to the left and their cells to the right.

    Args:
        rows: the cells of each row by its name, also of the heading.
    """
    columns = zip(*((name, *cells) for name, cells in rows.items()), strict=True)
    first, *widths = (max(map(len, column)) for column in columns)
    return [
        f"{name:{first}}" + "".join(f"  {cell:>{w}}" for cell, w in zip(cells, widths, strict=True))
        for name, cells in rows.items()
    ]


def _heading(record: Mapping[str, Any]) -> str:
    hardware = record["hardware"]
    place = hardware.get("device", hardware["processor"])
    threads = "" if "device" in hardware else f", {record['threads']} threads"
    return (
        f"{record.get('rules', 'AdamW')}, {record['model']}: {record['parameters']:,} parameters "
        f"in {record['tensors']} tensors, on {place}{threads}, "
        f"{record['rounds']} interleaved rounds, "
        f"our backend {record['backend']!r}"
    )


def _cells(row: Mapping[str, Any]) -> list[str]:
    peak, launches = row["peak_bytes_per_parameter"], row["launches"]
    return [
        bracket(row["ms"]),
        bracket(row["ratio"]),
        bracket(after) if (after := row.get("ratio_after_product")) else "-",
        number(per_byte["median"]) if (per_byte := row.get("ratio_per_byte")) else "-",
        number(row["ns_per_element"], 4),
        f"{row['moved_bytes_per_parameter']:.2f}",
        f"{row['gb_per_second']:.1f}",
        f"{row['share_of_copy']:.0%}",
        number(row["host_ms"]["median"]),
        "-" if launches is None else str(launches["kernels"]),
        f"{row['bytes_per_parameter']:.2f}",
        "-" if peak is None else f"{peak:.2f}",
    ]


def bracket(spread: Mapping[str, float]) -> str:
    """``median [p10, p90]``."""
    median, low, high = (number(spread[name]) for name in ("median", "p10", "p90"))
    return f"{median} [{low}, {high}]"
