"""The picture of a comparison for papers and slides, drawn with matplotlib."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .charts import scale_of_differences, unit_of
from .page import differences_of, is_calm, layers_of
from .style import COLOUR_OF_ROLE, KEPT, LOST, QUIET, inks

__all__ = ["draw"]


def draw(found: Mapping[str, Any], file: Path) -> None:
    """Draw curves, differences, bytes, times and kept updates; the file's suffix is the format."""
    from matplotlib.figure import Figure

    rows = found["rows"]
    colours = inks([row["name"] for row in rows], found["reference"])
    measured = [row for row in rows if row["bytes"] or row["ms"]]
    mapped = [row for row in rows if row["ends"] and not is_calm(row)]
    heights = [4.0]
    heights += [0.9 + 0.3 * len(rows)] if measured else []
    deepest = max((len(layers_of(row["layers"])) for row in mapped), default=0)
    lines = -(-len(mapped) // 3)
    heights += [(0.9 + 0.13 * deepest) * lines] if mapped else []
    figure: Any = Figure(figsize=(11, sum(heights)), layout="constrained")
    parts = list(figure.subfigures(len(heights), 1, height_ratios=heights, squeeze=False).ravel())
    _curves(parts.pop(0), found, colours)
    if measured:
        _costs(parts.pop(0), measured)
    if mapped:
        _maps(parts.pop(0), mapped, lines)
    figure.savefig(file, dpi=150)


def _curves(part: Any, found: Mapping[str, Any], colours: Mapping[str, str]) -> None:
    left, right = part.subplots(1, 2)
    steps = found["steps"]
    tails = []
    for row in found["rows"]:
        colour, curve = colours[row["name"]], row["curve"]
        left.plot(steps[: len(curve)], curve, color=colour, label=row["name"], linewidth=1.4)
        tails += curve[len(steps) // 12 :]
        if row["difference"] is None:
            continue
        mean, half = row["difference"]["mean"], row["difference"]["half"]
        right.plot(steps, mean, color=colour, linewidth=1.4)
        if half is not None:
            low = [m - h for m, h in zip(mean, half, strict=True)]
            high = [m + h for m, h in zip(mean, half, strict=True)]
            right.fill_between(steps, low, high, color=colour, alpha=0.15, linewidth=0)
    if tails:
        margin = 0.05 * (max(tails) - min(tails))
        left.set_ylim(min(tails) - margin, max(tails) + margin)
    left.set(xlabel="step", ylabel=found["measure"])
    left.legend(fontsize=7, frameon=False)
    means, edges = differences_of(found["rows"])
    if means:
        right.set_yscale("asinh", linear_width=unit_of(means))
        ticks = scale_of_differences(means, edges)[1]
        right.set_yticks(ticks, [f"{each:+g}" if each else "0" for each in ticks])
        right.set_yticks([], minor=True)
    right.axhline(0, color=QUIET, linewidth=0.8)
    right.set(xlabel="step", ylabel=f"difference to {found['reference']}, 95 % band")
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)


def _costs(part: Any, rows: Sequence[Mapping[str, Any]]) -> None:
    left, right = part.subplots(1, 2, sharey=True)
    names = [row["name"] for row in rows]
    begin = [0.0] * len(rows)
    for role, colour in COLOUR_OF_ROLE.items():
        sizes = [(row["bytes"] or {}).get(role, 0.0) for row in rows]
        bars = left.barh(names, sizes, left=begin, color=colour)
        labels = [f"{role} {size:.2g}" if size > 1.5 else "" for size in sizes]
        left.bar_label(bars, labels, label_type="center", fontsize=6)
        begin = [a + b for a, b in zip(begin, sizes, strict=True)]
    left.set_xlabel("bytes per parameter")
    for y, row in enumerate(rows):
        if row["ms"]:
            right.plot([row["ms"]["p10"], row["ms"]["p90"]], [y, y], color=QUIET, linewidth=3)
            right.plot(row["ms"]["p50"], y, "o", color="black", markersize=4)
    right.set_xlim(left=0)
    right.set_xlabel("ms per step: median, 10th to 90th percentile")
    left.invert_yaxis()
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)


def _maps(part: Any, rows: Sequence[Mapping[str, Any]], lines: int) -> None:
    from matplotlib.colors import LinearSegmentedColormap

    map_ = LinearSegmentedColormap.from_list("kept", [LOST, KEPT])
    axes = part.subplots(lines, 3, squeeze=False)
    for place in axes.ravel()[len(rows) :]:
        place.set_visible(False)
    for place, row in zip(axes.ravel(), rows, strict=False):
        layers = layers_of(row["layers"])
        table = [
            [float("nan") if v is None else v for v in each["windows"]] for each in layers.values()
        ]
        place.imshow(table, aspect="auto", cmap=map_, vmin=0, vmax=1)
        place.set_yticks(range(len(layers)), list(layers), fontsize=5)
        place.set_xticks([0, len(row["ends"]) - 1], ["1", f"{row['ends'][-1]:,}"], fontsize=6)
        place.set_title(f"{row['name']}: updates kept", fontsize=8)
