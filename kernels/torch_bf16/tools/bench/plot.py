"""Draw runs from their records: time and memory side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = ["plot"]


def plot(records: Sequence[Mapping[str, Any]], file: Path) -> None:
    """Draw records, one below the other, into a file whose suffix is the format."""
    from matplotlib.figure import Figure

    heights = [1.6 + 0.42 * len(each["results"]) for each in records]
    figure = Figure(figsize=(11, sum(heights)), layout="constrained")
    parts: Any = figure.subfigures(len(records), 1, squeeze=False, height_ratios=heights)
    for part, record in zip(parts.ravel(), records, strict=True):
        _draw(part, record)
    figure.savefig(file, dpi=150)


def _draw(figure: Any, record: Mapping[str, Any]) -> None:
    rows = sorted(record["results"], key=lambda row: -row["ms"]["median"])
    names = [row["name"] for row in rows]
    ours = set(record["ours"])
    colors = ["tab:orange" if name in ours else "tab:gray" for name in names]
    speed, memory = figure.subplots(1, 2, sharey=True)

    medians = [row["ms"]["median"] for row in rows]
    low = [row["ms"]["median"] - row["ms"]["p10"] for row in rows]
    high = [row["ms"]["p90"] - row["ms"]["median"] for row in rows]
    bars = speed.barh(names, medians, xerr=[low, high], color=colors, ecolor="black")
    shares = [f"{row['ms']['median']:.3g} ms, {row['share_of_copy']:.0%}" for row in rows]
    speed.bar_label(bars, shares, padding=4, fontsize=8)
    if medians and max(medians) > 20 * min(medians):
        speed.set_xscale("log")
    speed.margins(x=0.35)
    speed.set_xlabel("ms per step (10th to 90th percentile), share of a device copy")

    peaks = [row["peak_bytes_per_parameter"] or row["bytes_per_parameter"] for row in rows]
    bars = memory.barh(names, peaks, color=colors)
    memory.bar_label(bars, [f"{each:.2f}" for each in peaks], padding=4, fontsize=8)
    memory.margins(x=0.15)
    memory.set_xlabel("bytes per parameter: weights, gradients, states, at the peak")

    hardware = record["hardware"]
    place = hardware.get("device", hardware["processor"])
    figure.suptitle(
        f"One step, {record.get('rules', 'AdamW')}, {record['model']}, "
        f"{record['parameters'] / 1e6:,.0f} M parameters, {place}, {record['date']}",
        fontsize=10,
    )
