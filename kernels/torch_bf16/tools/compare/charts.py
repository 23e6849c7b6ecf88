"""The drawings of the page: lines, bands, bars and heat maps.

Lines are drawn in SVG that stretches; text is HTML over it, so that it is as large on a phone as on
a wide screen.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from html import escape

__all__ = ["Curve", "curves", "heat_map", "panel", "scale_of_differences", "stack", "unit_of"]

_GAP = 15.0


class Curve:
    """A line of a chart.

    Args:
        name: its label.
        colour: a CSS colour.
        values: the value at each step; None if there is none.
    """

    def __init__(self, name: str, colour: str, values: Sequence[float | None]) -> None:
        self.name, self.colour, self.values = name, colour, values


def curves(
    steps: Sequence[int], lines: Sequence[Curve], low: float, high: float, decimals: int = 3
) -> str:
    """Lines over each other, labelled where they end.

    Args:
        steps: the steps of the values.
        lines: the reference first; it is drawn over the others.
        low: the lower end of the vertical scale.
        high: its upper end; lines are cut off above it.
        decimals: those of the last values, which stand beside the labels.
    """
    height = max(280.0, 26 + _GAP * len(lines))

    def y(value: float) -> float:
        return (high - value) / ((high - low) or 1.0)

    marks = [_grid(y(tick)) for tick in _ticks(low, high)]
    marks += [_path(steps, each, y, 2.5 if n == 0 else 1.6) for n, each in enumerate(lines)][::-1]
    texts = [_tick(y(tick), f"{tick:g}") for tick in _ticks(low, high)]
    ends = [next((v for v in reversed(each.values) if v is not None), None) for each in lines]
    places = _apart([y(high if end is None else end) * height for end in ends], height)
    for each, end, place in zip(lines, ends, places, strict=True):
        value = "no number" if end is None else f"{end:.{decimals}f}"
        label = f"{escape(each.name)} <b>{value}</b>"
        texts.append(
            f'<span class="t end" style="top:{place:.1f}px;color:{each.colour}">{label}</span>'
        )
    width = min(max(len(each.name) for each in lines) + 6, 30) * 6.6 + 12
    texts += _under(steps)
    return _plot(height, marks, texts, f"margin-right:min({width:.0f}px,46%)")


def panel(
    steps: Sequence[int],
    line: Curve,
    half: Sequence[float | None] | None,
    scale: tuple[Callable[[float], float], Sequence[float]],
) -> str:
    """One paired difference, with its band around it.

    Args:
        steps: the steps of the values.
        line: the mean difference.
        half: half the band's width; None if there is no band.
        scale: from :func:`scale_of_differences`, the same for all panels.
    """
    y, ticks = scale
    marks = [_grid(y(tick), "zero" if tick == 0 else "grid") for tick in ticks]
    if half is not None:
        pairs = [
            (x, m, h)
            for x, m, h in zip(_across(steps), line.values, half, strict=True)
            if m is not None and h is not None
        ]
        above = [f"{x:.2f},{100 * y(m + h):.2f}" for x, m, h in pairs]
        below = [f"{x:.2f},{100 * y(m - h):.2f}" for x, m, h in reversed(pairs)]
        if pairs:
            outline = "L".join([*above, *below])
            marks.append(f'<path class="band" d="M{outline}Z" style="fill:{line.colour}"/>')
    marks.append(_path(steps, line, y, 1.8))
    texts = [_tick(y(tick), "0" if tick == 0 else f"{tick:+g}") for tick in ticks]
    return _plot(130, marks, [*texts, *_under(steps)], "margin-right:10px")


def scale_of_differences(
    means: Sequence[float], edges: Sequence[float]
) -> tuple[Callable[[float], float], Sequence[float]]:
    """A scale that shows both small and large differences: linear around 0, then by powers of ten.

    Args:
        means: all mean differences that are shown.
        edges: the edges of their bands; wide bands are cut off at three times the largest mean.

    Returns:
        A function from a difference to its place, 0 at the top and 1 at the bottom; and the ticks.
    """
    unit = unit_of(means)
    limit = 3 * max(abs(each) for each in (*means, unit))

    def bent(value: float) -> float:
        return math.asinh(value / unit)

    top = 1.06 * bent(min(max(unit, *means, *edges), limit))
    bottom = 1.06 * bent(max(min(-unit, *means, *edges), -limit))

    def place(value: float) -> float:
        return (top - bent(value)) / (top - bottom)

    powers = [unit * 10.0**n for n in range(8)]
    shown: list[float] = []
    for tick in (0.0, *powers, *(-each for each in powers)):
        clear = all(abs(place(tick) - place(other)) > 0.12 for other in shown)
        if 0.02 < place(tick) < 0.98 and clear:
            shown.append(float(f"{tick:.3g}"))
    return place, shown


def unit_of(means: Sequence[float]) -> float:
    """The power of ten at or below the median size of differences."""
    usual = sorted(abs(each) for each in means if each) or [1e-9]
    return 10.0 ** math.floor(math.log10(usual[len(usual) // 2]))


def stack(parts: Sequence[tuple[str, float]], largest: float) -> str:
    """One bar of several parts, which have their labels inside if there is room.

    Args:
        parts: the name and size of each part.
        largest: the total of the largest bar.
    """
    spans = []
    for n, (name, size) in enumerate(parts):
        share = size / largest
        text = f"<em>{name} </em>{size:.3g}" if share > 0.045 else ""
        room = "" if text else ' class="none"'
        spans.append(
            f'<span{room} title="{name} {size:.3g}" '
            f'style="width:{100 * share:.2f}%;background:var(--r{n})">{text}</span>'
        )
    return f'<div class="stack mark">{"".join(spans)}</div>'


def heat_map(rows: Sequence[Sequence[float | None]], titles: Sequence[str]) -> str:
    """Cells that show what was kept: a layer in each row, time from left to right."""
    height = len(rows)
    width = max(map(len, rows), default=0)
    cells = [f'<rect class="kept" width="{width}" height="{height}"/>']
    for y, (row, title) in enumerate(zip(rows, titles, strict=True)):
        found = []
        for x, share in enumerate(row):
            missing = 0.0 if share is None else 1 - min(max(share, 0.0), 1.0)
            if missing > 0.02:
                found.append(
                    f'<rect class="lost" x="{x}" y="{y + 0.04}" width="1.02" height="0.92" '
                    f'fill-opacity="{missing:.2f}"/>'
                )
        cells.append(f"<g><title>{escape(title)}</title>{''.join(found)}</g>")
    return (
        f'<svg viewBox="0 0 {width} {height}" preserveAspectRatio="none" role="img" '
        f'aria-label="share of updates kept, by layer and time">{"".join(cells)}</svg>'
    )


def _plot(height: float, marks: Sequence[str], texts: Sequence[str], style: str) -> str:
    drawing = '<svg viewBox="0 0 100 100" preserveAspectRatio="none" aria-hidden="true">'
    return (
        f'<div class="plot" style="height:{height:.0f}px;{style}">{drawing}{"".join(marks)}</svg>'
        f"{''.join(texts)}</div>"
    )


def _path(steps: Sequence[int], line: Curve, y: Callable[[float], float], width: float) -> str:
    points = [
        f"{x:.2f},{100 * y(value):.2f}"
        for x, value in zip(_across(steps), line.values, strict=False)
        if value is not None
    ]
    drawn = "M" + "L".join(points) if points else "M0,0"
    return f'<path d="{drawn}" style="stroke:{line.colour};stroke-width:{width}"/>'


def _across(steps: Sequence[int]) -> list[float]:
    span = max(steps[-1] - steps[0], 1)
    return [100 * (step - steps[0]) / span for step in steps]


def _grid(place: float, kind: str = "grid") -> str:
    at = f"{100 * place:.2f}"
    return f'<line class="{kind}" x1="0" x2="100" y1="{at}" y2="{at}"/>'


def _tick(place: float, text: str) -> str:
    return f'<span class="t y" style="top:{100 * place:.2f}%">{text.replace("-", "&#8722;")}</span>'


def _under(steps: Sequence[int]) -> list[str]:
    first, last = f"step {steps[0]:,}", f"{steps[-1]:,}"
    return [
        f'<span class="t x first" style="left:0">{first}</span>',
        f'<span class="t x last" style="left:100%">{last}</span>',
    ]


def _ticks(low: float, high: float) -> list[float]:
    step = 10.0 ** math.floor(math.log10(max(high - low, 1e-12)))
    step = next(s for s in (step / 5, step / 2, step, 2 * step) if (high - low) / s <= 6)
    first = math.ceil(low / step)
    return [float(f"{n * step:.10g}") for n in range(first, math.floor(high / step) + 1)]


def _apart(places: Sequence[float], height: float) -> list[float]:
    """Labels at these places, pushed from each other until none overlaps."""
    order = sorted(range(len(places)), key=lambda n: places[n])
    found = [min(max(places[n], 0.0), height) for n in order]
    for _ in range(200):
        moved = False
        for a in range(len(found) - 1):
            lack = _GAP - (found[a + 1] - found[a])
            if lack > 0.01:
                found[a], found[a + 1], moved = found[a] - lack / 2, found[a + 1] + lack / 2, True
        found = [each - min(0.0, found[0]) - max(0.0, found[-1] - height) for each in found]
        if not moved:
            break
    result = [0.0] * len(places)
    for place, n in zip(found, order, strict=True):
        result[n] = place
    return result
