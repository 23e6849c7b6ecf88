"""How the page looks: its colours on light and dark grounds, and its style sheet."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

__all__ = ["STYLE", "colours", "inks"]

# Hues that colour-blind readers can tell apart come first; each for light and for dark grounds.
_REFERENCE = 0
_PALETTE = (
    *(("#5c6168", "#b6bcc4"), ("#0068a8", "#5cb3f0"), ("#00825f", "#35c79a")),
    *(("#c94f00", "#ff8a47"), ("#9a4a8c", "#d690c8"), ("#8f6c00", "#dcb53c")),
    *(("#3a86b8", "#93cdf3"), ("#7a5230", "#cda274"), ("#bb4a78", "#f292b7")),
    *(("#167a84", "#55c6d0"), ("#5757b8", "#a6a6f7"), ("#65741c", "#b3c751")),
    *(("#a23a3a", "#f09a94"),),
)
_USUAL = {"bf16-fp32-master": 1, "bf16-stochastic": 2, "bf16-true": 3}


def colours(names: Sequence[str], reference: str) -> Mapping[str, str]:
    """A colour for each row, as a value of CSS: the same for a precision on every page."""
    return {name: f"var(--c{n})" for name, n in _numbers(names, reference).items()}


def inks(names: Sequence[str], reference: str) -> Mapping[str, str]:
    """The same colours on white, as hexadecimal numbers."""
    return {name: _PALETTE[n][0] for name, n in _numbers(names, reference).items()}


def _numbers(names: Sequence[str], reference: str) -> dict[str, int]:
    usual = {name: _USUAL[name] for name in names if name in _USUAL}
    free = itertools.cycle(n for n in range(1, len(_PALETTE)) if n not in usual.values())
    return {
        name: _REFERENCE if name == reference else usual.get(name) or next(free) for name in names
    }


def _series(ground: int) -> str:
    return "".join(f"--c{n}:{pair[ground]};" for n, pair in enumerate(_PALETTE))


QUIET, KEPT, LOST = "#5c6168", "#dcebf3", "#c23b00"
COLOUR_OF_ROLE = {
    "weights": "#b9c6d2",
    "gradients": "#d9dee4",
    "moments": "#9fc3dc",
    "master": "#e3c48c",
}
"""What the bytes of a parameter are for, and their colours on white, in the figure, too."""

_LIGHT = (
    f"--paper:#fff;--ink:#1d2125;--quiet:{QUIET};--line:#dfe2e6;--soft:#f4f5f7;"
    f"--kept:{KEPT};--lost:{LOST};"
    f"{''.join(f'--r{n}:{colour};' for n, colour in enumerate(COLOUR_OF_ROLE.values()))}"
    f"--on:#1d2125;{_series(0)}"
)
_DARK = (
    "--paper:#15181c;--ink:#e4e7eb;--quiet:#a3abb4;--line:#333a42;--soft:#1d2126;"
    "--kept:#1f333f;--lost:#ff7a33;--r0:#4c5c6b;--r1:#39424c;--r2:#2f6283;--r3:#77592a;"
    f"--on:#eef1f4;{_series(1)}"
)

STYLE = f"""
:root{{{_LIGHT}}}
@media (prefers-color-scheme:dark){{:root{{{_DARK}}}}}
@media print{{:root{{{_LIGHT}}}}}
*{{box-sizing:border-box}}
html{{-webkit-text-size-adjust:100%}}
body{{margin:0;background:var(--paper);color:var(--ink);
font:16px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif;
-webkit-print-color-adjust:exact;print-color-adjust:exact}}
main{{max-width:1160px;margin:0 auto;padding:32px 20px 64px}}
h1{{font-size:28px;line-height:1.2;font-weight:650;margin:0 0 10px;max-width:34em;
text-wrap:balance}}
h2{{font-size:18px;line-height:1.3;font-weight:650;margin:48px 0 2px}}
h3{{font-size:14px;font-weight:600;margin:0;overflow-wrap:anywhere}}
p{{margin:0 0 12px;max-width:44em}}
.quiet,figcaption{{color:var(--quiet);font-size:14px;line-height:1.45}}
.quiet{{margin-bottom:16px}}
.verdict{{list-style:none;margin:20px 0 0;padding:0;max-width:52em}}
.verdict li{{padding:7px 0 7px 14px;border-left:3px solid var(--line);margin:0 0 6px}}
.verdict .bad{{border-color:var(--lost)}}
.wide{{overflow-x:auto;margin-top:14px}}
table{{border-collapse:collapse;font-size:14px;font-variant-numeric:tabular-nums}}
th,td{{text-align:right;padding:5px 0 5px 22px;border-bottom:1px solid var(--line);
white-space:nowrap;font-weight:400}}
thead th{{color:var(--quiet);font-size:13px;vertical-align:bottom}}
th:first-child{{text-align:left;padding-left:0;font-weight:600}}
figure{{margin:0}}
.plot{{position:relative;margin:10px 0 30px 46px}}
.plot svg{{position:absolute;inset:0;width:100%;height:100%;overflow:hidden}}
.plot path,.plot line{{vector-effect:non-scaling-stroke;fill:none}}
.plot .band{{stroke:none;fill-opacity:.22}}
.grid{{stroke:var(--line);stroke-width:1}}
.zero{{stroke:var(--quiet);stroke-width:1}}
.t{{position:absolute;font-size:12px;line-height:14px;color:var(--quiet);white-space:nowrap;
font-variant-numeric:tabular-nums}}
.y{{right:100%;margin-right:7px;transform:translateY(-50%)}}
.x{{top:100%;margin-top:6px;transform:translateX(-50%)}}
.x.first{{transform:none}}.x.last{{transform:translateX(-100%)}}
.end{{left:100%;margin-left:7px;transform:translateY(-50%);font-weight:600}}
.end b{{font-weight:400}}
.many{{display:grid;grid-template-columns:repeat(auto-fit,minmax(250px,1fr));gap:6px 32px}}
.heats{{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,350px),1fr));
gap:26px 36px}}
.many figure,.heats figure{{min-width:0}}
.bars{{display:grid;grid-template-columns:max-content minmax(0,1fr) max-content;
gap:7px 16px;align-items:center;grid-auto-flow:row dense;font-size:14px;margin-top:12px}}
.bars .name{{font-weight:600;overflow-wrap:anywhere;max-width:15em}}
.bars .mark{{grid-column:2}}
.bars .sum{{grid-column:3;font-variant-numeric:tabular-nums;text-align:right;white-space:nowrap}}
.bars .sum small{{color:var(--quiet);font-size:12px}}
.stack{{display:flex;height:26px;gap:1px}}
.stack span{{overflow:hidden;white-space:nowrap;font-size:12px;line-height:26px;padding-left:6px;
color:var(--on);min-width:0;container-type:inline-size}}
.stack em{{font-style:normal}}@container (max-width:72px){{.stack em{{display:none}}}}
.stack .none{{padding:0}}
.range{{position:relative;height:20px;background:linear-gradient(var(--line),var(--line))
center/100% 1px no-repeat}}
.range i{{position:absolute;top:6px;height:8px;border-radius:4px;opacity:.45}}
.range b{{position:absolute;top:2px;height:16px;width:3px;margin-left:-1.5px;border-radius:2px}}
.heat{{display:grid;grid-template-columns:minmax(0,13em) minmax(0,1fr) 3.2em;column-gap:8px;
font-size:11px;line-height:15px;margin-top:6px}}
.heat svg{{width:100%;height:100%;display:block;grid-column:2;grid-row:2}}
.heat .layers{{grid-column:1;grid-row:2;text-align:right;color:var(--quiet)}}
.heat .layers div{{overflow:hidden;text-overflow:ellipsis;white-space:nowrap;direction:rtl}}
.heat .stood{{grid-column:3;grid-row:2;text-align:right;font-variant-numeric:tabular-nums}}
.heat .over{{grid-column:3;grid-row:1;text-align:right;color:var(--quiet);line-height:12px;
padding-bottom:3px}}
.heat .under{{grid-column:2;grid-row:3;display:flex;justify-content:space-between;
color:var(--quiet);padding-top:3px}}
.kept{{fill:var(--kept)}}.lost{{fill:var(--lost)}}
.key{{display:inline-block;width:84px;height:11px;margin:0 6px;vertical-align:-1px;
background:linear-gradient(90deg,var(--kept),var(--lost))}}
dl{{display:grid;grid-template-columns:max-content minmax(0,1fr);gap:3px 20px;font-size:14px;
margin:12px 0 0}}
dt{{color:var(--quiet)}}dd{{margin:0;overflow-wrap:anywhere}}
code{{font:13px/1.5 ui-monospace,SFMono-Regular,Menlo,Consolas,monospace}}
@media (max-width:640px){{
main{{padding:22px 16px 48px}}h1{{font-size:23px}}h2{{margin-top:38px}}
.end{{font-size:11px}}.end b{{display:none}}
.bars{{grid-template-columns:minmax(0,1fr) max-content;gap:2px 12px}}
.bars .name{{max-width:none}}.bars .sum{{grid-column:2}}
.bars .mark{{grid-column:1/-1;margin-bottom:9px}}
.many{{grid-template-columns:repeat(2,minmax(0,1fr));gap:6px 14px}}
.heats{{grid-template-columns:minmax(0,1fr)}}
dl{{grid-template-columns:minmax(0,1fr)}}dd{{margin-bottom:6px}}
}}
@media print{{main{{max-width:none;padding:0}}section,figure,tr{{break-inside:avoid}}
body{{font-size:13px}}h2{{margin-top:26px}}}}
"""
