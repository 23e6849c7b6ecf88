"""Print the record of a selftest for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch_bf16.tools.machine import machine_lines
from torch_bf16.tools.output import print_table

__all__ = ["show"]

_Rows = list[Sequence[str]]


def show(found: Mapping[str, Any]) -> None:
    """Print a selftest's record."""
    print("\n".join(_environment_lines(found["environment"])))
    tried = found["certificates"]
    right = sum(each["fault"] is None for each in tried)
    print(f"\ncertificates: {right} of {len(tried)} kernels have the bits of the oracle")
    for each in tried:
        if each["fault"]:
            print(f"  {each['backend']}, {each['variant']}: {each['fault']}")
    rows: _Rows = [
        (each["name"], each["skipped"] or each["fault"] or "ok", f"{each['seconds']:.2f}")
        for each in found["checks"]
    ]
    print_table("whole optimizers against eager", ("check", "result", "seconds"), rows)
    for each in found["speed"]:
        title = f"{each['model']}: {each['parameters']:,} parameters, {each['tensors']} tensors"
        copy = each["copy_gb_per_second"]["median"]
        print_table(f"{title}; a copy of this device: {copy:.0f} GB/s", *_speed(each))
        for name, why in each["failed"].items():
            print(f"not measured: {name}: {why}")
    for note in found["notes"]:
        print(f"note: {note}")
    print(f"\n{found['verdict']} ({found['seconds']:.0f} s)")


def _environment_lines(found: Mapping[str, Any]) -> list[str]:
    lines = machine_lines(found)
    if state := found["device_state"]:
        lines.append(", ".join(f"{name} {value}" for name, value in state.items()))
    for name, reason in found["backends"].items():
        lines.append(f"backend {name}: {'works' if reason is None else reason}")
    return [*lines, *(f"{name}={value}" for name, value in found["variables"].items())]


def _speed(record: Mapping[str, Any]) -> tuple[Sequence[str], _Rows]:
    columns = ("AdamW", "ms per step", "to torch fused", "of copy", "host ms", "bytes each")
    rows: _Rows = [
        (
            row["name"],
            f"{row['ms']['median']:.3f}",
            f"{row['ratio']['median']:.2f}",
            f"{row['share_of_copy']:.0%}",
            f"{row['host_ms']['median']:.3f}",
            f"{row['bytes_per_parameter']:.2f}",
        )
        for row in record["results"]
    ]
    return columns, rows
