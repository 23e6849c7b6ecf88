"""The page of a comparison: one file that needs nothing else."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from torch_bf16.tools.output import share
from torch_bf16.tools.sampling import kind_of

from .charts import Curve, curves, heat_map, panel, scale_of_differences, stack
from .report import interval, summary
from .style import COLOUR_OF_ROLE, STYLE, colours
from .verdict import BAD, LOWER, decimals_of, ends_near

__all__ = ["differences_of", "headline", "is_calm", "layers_of", "page"]

_MOST_LAYERS = 28
_NAMED_ROWS = 3
_CALM = 0.9


def page(found: Mapping[str, Any]) -> str:
    """The page, as well-formed HTML.

    Args:
        found: the record of a comparison.
    """
    rows = found["rows"]
    colour = colours([row["name"] for row in rows], found["reference"])
    sections = [
        _verdict(found),
        _table(found, colour),
        _losses(found, colour),
        _differences(found, colour),
        _bytes(rows, colour),
        _times(rows, colour),
        _updates(found, colour),
        _environment(found),
    ]
    title = escape(headline(found))
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"/>'
        '<meta name="viewport" content="width=device-width,initial-scale=1"/>'
        '<meta name="color-scheme" content="light dark"/>'
        f"<title>{title}</title><style>{STYLE}</style></head>\n<body><main>\n"
        + "\n".join(each for each in sections if each)
        + "\n</main></body></html>\n"
    )


def headline(found: Mapping[str, Any]) -> str:
    """The result in a line."""
    others = [row for row in found["rows"] if row["name"] != found["reference"]]
    good = [row["name"] for row in others if row["verdict"] == "as good"]
    reference = found["reference"]
    if len(good) <= _NAMED_ROWS and good:
        return found["sentences"][0]
    if good:
        return f"{len(good)} of {len(others)} end {ends_near(found)}"
    bad = [row["name"] for row in others if row["verdict"] in BAD]
    if bad:
        return f"{len(bad)} of {len(others)} do not end where {reference} ends"
    return f"{len(others)} beside {reference}"


def _verdict(found: Mapping[str, Any]) -> str:
    title = headline(found)
    items = []
    bad = [row["name"] for row in found["rows"] if row["verdict"] in BAD]
    for sentence in found["sentences"]:
        if sentence == title:
            continue
        kind = ' class="bad"' if any(sentence.startswith(f"{name} ") for name in bad) else ""
        items.append(f"<li{kind}>{escape(sentence)}</li>")
    seeds = max(len(row["seeds"]) for row in found["rows"])
    runs = f"{seeds} paired runs of each" if seeds > 1 else "one run of each"
    steps = f"steps {found['first_step']:,} to {found['last_step']:,}"
    made = f"Made by torch-bf16 compare, {found['date']}" if found.get("date") else ""
    about = f"{found['what']}: {runs}, {steps}. {made}"
    return (
        f'<section><h1>{escape(title)}</h1><p class="quiet">{escape(about)}</p>'
        f'<ul class="verdict">{"".join(items)}</ul></section>'
    )


def _table(found: Mapping[str, Any], colour: Mapping[str, str]) -> str:
    columns, cells = summary(found)
    head = "".join(f"<th>{escape(each)}</th>" for each in columns)
    body = ""
    for row in cells:
        name = f'<th style="color:{colour[row[0]]}">{escape(row[0])}</th>'
        body += f"<tr>{name}{''.join(f'<td>{escape(each)}</td>' for each in row[1:])}</tr>"
    what = (
        f"{found['measure']}: mean of the last {found['final_over']} of the steps. Difference to "
        f"{found['reference']}, pair by pair, with its 95 % interval (Student's t)."
    )
    return (
        f'<section><h2>All figures</h2><p class="quiet">{escape(_capital(what))}</p>'
        f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'
        f"</div>{_notes(found)}</section>"
    )


def _notes(found: Mapping[str, Any]) -> str:
    return "".join(f'<p class="quiet">{escape(_capital(note))}.</p>' for note in found["notes"])


def _losses(found: Mapping[str, Any], colour: Mapping[str, str]) -> str:
    steps = found["steps"]
    rows = sorted(found["rows"], key=lambda row: row["name"] != found["reference"])
    lines = [Curve(row["name"], colour[row["name"]], row["curve"]) for row in rows]
    known = [value for line in lines for value in line.values if value is not None]
    if not known:
        return ""
    # The first steps are much the same in all rows and would take most of the height.
    later = [v for line in lines for v in line.values[len(steps) // 12 :] if v is not None]
    low, high = min(known), max(later or known)
    margin = 0.04 * (high - low) or 0.1
    drawn = curves(steps, lines, low - margin, high + margin, decimals_of(found) - 1)
    mean = f", mean of {found['smoothed_over']} steps" if found["smoothed_over"] > 1 else ""
    return (
        f"<section><h2>{escape(_capital(found['measure']))}</h2>"
        f'<p class="quiet">Mean over runs{mean}.</p><figure>{drawn}</figure></section>'
    )


def _differences(found: Mapping[str, Any], colour: Mapping[str, str]) -> str:
    rows = [row for row in found["rows"] if row["difference"]]
    means, edges = differences_of(rows)
    if not means:
        return ""
    scale, digits = scale_of_differences(means, edges), decimals_of(found)
    panels = []
    for row in rows:
        line = Curve(row["name"], colour[row["name"]], row["difference"]["mean"])
        drawn = panel(found["steps"], line, row["difference"]["half"], scale)
        against = row["against"]
        caption = f"{against['mean']:+.{digits}f} at the end"
        if against["low"] is not None:
            caption += f" ({interval(against, digits)})"
        panels.append(
            f'<figure><h3 style="color:{line.colour}">{escape(row["name"])}</h3>'
            f"<figcaption>{escape(caption.replace('-', chr(0x2212)))}</figcaption>{drawn}</figure>"
        )
    band = "with its 95 % band" if edges else "of one pair, which has no band"
    worse = "Above" if found["better"] == LOWER else "Below"
    why = (
        f"Step by step on the same batches, {band}. {worse} 0 is worse than {found['reference']}. "
        "The scale is linear near 0 and continues by powers of ten."
    )
    return (
        f'<section><h2>Difference to {escape(found["reference"])}</h2><p class="quiet">'
        f'{escape(why)}</p><div class="many">{"".join(panels)}</div></section>'
    )


def differences_of(rows: Sequence[Mapping[str, Any]]) -> tuple[list[float], list[float]]:
    """All mean differences, and the edges of their bands."""
    means, edges = [], []
    for each in (row["difference"] for row in rows if row["difference"]):
        means += each["mean"]
        for mean, half in zip(each["mean"], each["half"] or (), strict=False):
            edges += [mean - half, mean + half]
    return means, edges


def _bytes(rows: Sequence[Mapping[str, Any]], colour: Mapping[str, str]) -> str:
    known = [row for row in rows if row["bytes"]]
    if not known:
        return ""
    largest = max(sum(row["bytes"].values()) for row in known)
    lines = ""
    for row in known:
        drawn = stack([(role, row["bytes"].get(role, 0.0)) for role in COLOUR_OF_ROLE], largest)
        total = f"{sum(row['bytes'].values()):.2f}"
        lines += _bar(row["name"], colour, drawn, total)
    why = "Held at the end of a backward pass; activations are not counted."
    return (
        f'<section><h2>Bytes per parameter</h2><p class="quiet">{why}</p>'
        f'<div class="bars">{lines}</div></section>'
    )


def _times(rows: Sequence[Mapping[str, Any]], colour: Mapping[str, str]) -> str:
    known = [row for row in rows if row["ms"]]
    if not known:
        return ""
    largest = max(row["ms"]["p90"] for row in known)
    lines = ""
    for row in known:
        low, middle, high = (100 * row["ms"][key] / largest for key in ("p10", "p50", "p90"))
        ink = f"background:{colour[row['name']]}"
        drawn = (
            f'<div class="range mark"><i style="left:{low:.2f}%;width:{high - low:.2f}%;{ink}"></i>'
            f'<b style="left:{middle:.2f}%;{ink}"></b></div>'
        )
        label = f"{row['ms']['p50']:.3g} ms"
        if row["optimizer_ms"]:
            label += f" <small>optimizer {row['optimizer_ms']['p50']:.2g}</small>"
        lines += _bar(row["name"], colour, drawn, label)
    why = "Mark: the median; bar: from the 10th to the 90th percentile; the scale starts at 0."
    return (
        f'<section><h2>Time per step</h2><p class="quiet">{why}</p>'
        f'<div class="bars">{lines}</div></section>'
    )


def _bar(name: str, colour: Mapping[str, str], drawn: str, said: str) -> str:
    shown = f'<div class="name" style="color:{colour[name]}">{escape(name)}</div>'
    return f'{shown}<div class="sum">{said}</div>{drawn}'


def _updates(found: Mapping[str, Any], colour: Mapping[str, str]) -> str:
    panels, calm = "", []
    for row in found["rows"]:
        if not row["layers"]:
            continue
        if len(found["rows"]) > _NAMED_ROWS + 1 and is_calm(row):
            calm.append(row["name"])
            continue
        layers = layers_of(row["layers"])
        names = "".join(f'<div title="{escape(n)}">&#8206;{escape(n)}</div>' for n in layers)
        stood = "".join(f"<div>{_share(each['unmoved'])}</div>" for each in layers.values())
        windows = [each["windows"] for each in layers.values()]
        titles = [
            f"{name}: {_share(each['survived'])} kept, {_share(each['unmoved'])} never moved"
            for name, each in layers.items()
        ]
        drawn = heat_map(windows, titles) if row["ends"] else "<div></div>"
        ends = f"<span>1</span><span>{row['ends'][-1]:,}</span>" if row["ends"] else ""
        panels += (
            f'<figure><h3 style="color:{colour[row["name"]]}">{escape(row["name"])}</h3>'
            f"<figcaption>{_share(row['survived'])} kept, {_share(row['unmoved'])} never moved"
            f'</figcaption><div class="heat"><div class="over">never moved</div>'
            f'<div class="layers">{names}</div>{drawn}<div class="stood">{stood}</div>'
            f'<div class="under">{ends}</div></div></figure>'
        )
    if not panels and not calm:
        return ""
    kept = f"{', '.join(calm)}: every layer kept at least {_CALM:.0%} of its updates in every "
    kept += "window, and every element moved, so they are not drawn."
    why = (
        "Each layer is a line, time runs from left to right. Colour is the share of the update "
        "that was not stored, compared with an fp32 twin of the optimizer on the same gradients:"
    )
    return (
        f'<section><h2>Updates that were kept, and elements that never moved</h2><p class="quiet">'
        f'{why} all kept<span class="key"></span>all lost.</p>'
        f'{"<p>" + escape(kept) + "</p>" if calm else ""}<div class="heats">{panels}</div>'
        "</section>"
    )


def is_calm(row: Mapping[str, Any]) -> bool:
    """Whether there is nothing to see: updates are kept at all times, and every element moved."""
    windows = [share for each in row["layers"].values() for share in each["windows"]]
    calm = all(share is None or share >= _CALM for share in windows)
    return calm and bool(windows) and (row["unmoved"] or 0.0) < 0.0005


def layers_of(layers: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Layers to show; if there are too many, those of one kind together, as ``blocks.*.qkv``."""
    if len(layers) <= _MOST_LAYERS:
        return {_short(name, layers): dict(each) for name, each in layers.items()}
    kinds: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for name, each in layers.items():
        kinds[kind_of(name)].append(each)
    shown = list(kinds.items())[:_MOST_LAYERS]
    return {
        _short(name, kinds): {
            "windows": [
                _mean(column) for column in zip(*(m["windows"] for m in members), strict=False)
            ],
            "survived": _mean([m["survived"] for m in members]),
            "unmoved": _mean([m.get("unmoved") for m in members]),
        }
        for name, members in shown
    }


def _short(name: str, names: Mapping[str, object]) -> str:
    """A name without its first part, if all names begin with that."""
    first = name.partition(".")[0] + "."
    shared = len(names) > 1 and all(each.startswith(first) for each in names)
    return name[len(first) :] if shared else name


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _environment(found: Mapping[str, Any]) -> str:
    entries = (
        [("command", f"<code>{escape(found['command'])}</code>")] if "command" in found else []
    )
    for row in found["rows"]:
        options_that_are_on = re.sub(r", \w+=False", "", row["options"])
        parts = row.get("described"), options_that_are_on
        if description := "; ".join(filter(None, parts)):
            entries.append((row["name"], escape(description)))
    for part in ("settings", "environment"):
        entries += [(name, escape(str(value))) for name, value in found.get(part, {}).items()]
    items = "".join(f"<dt>{escape(name)}</dt><dd>{value}</dd>" for name, value in entries)
    return f"<section><h2>How it was made</h2><dl>{items}</dl></section>" if items else ""


def _share(value: float | None) -> str:
    return "&#8211;" if value is None else share(value)


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
