"""The page of ``compare``: one file, well formed, and its drawings are those of the figures."""

import re
import xml.etree.ElementTree as ElementTree
from itertools import pairwise

import pytest
from compare_cases import run

from torch_bf16.tools.compare.analysis import analyse
from torch_bf16.tools.compare.page import headline, layers_of, page
from torch_bf16.tools.compare.style import colours, inks
from torch_bf16.tools.compare.verdict import judge

LAYERS = {"blocks.0.norm": [[0.2, 1.0], [0.0, 1.0]], "blocks.0.fc": [[1.0, 1.0], [2.0, 2.0]]}


def found_of(rows, **about):
    found = {"what": "a model", "measure": "loss", "notes": [], **analyse(rows, next(iter(rows)))}
    judge(found)
    return {**found, **about}


def losses(seed, extra=0.0):
    return [4 / (step + 1) + 0.1 * seed + extra * (1 + seed) for step in range(20)]


@pytest.fixture
def found():
    rows = {"fp32": [run("fp32", seed, losses(seed)) for seed in range(3)]}
    rows["<b>&odd"] = [run("<b>&odd", seed, losses(seed, 0.2)) for seed in range(3)]
    for name, runs in rows.items():
        for each in runs:
            each.bytes = {"weights": 40, "gradients": 40, "moments": 80, "master": 0}
            each.parameters, each.seconds = 10, [0.01 * n for n in range(1, 21)]
            each.optimizer_seconds = [0.001] * 20
            each.ends = [10, 20]
            share = {k: v if name != "fp32" else [[b, b] for _, b in v] for k, v in LAYERS.items()}
            each.survived = share
            each.unmoved = {"blocks.0.norm": [6, 8], "blocks.0.fc": [0, 32]}
    return found_of(rows, command="python -m torch_bf16 compare", environment={"torch": "2"})


def tree(text):
    return ElementTree.fromstring(text.replace("&#160;", " "))


def test_it_is_well_formed_and_needs_no_other_file(found):
    text = page(found)
    assert tree(text).tag == "html"
    assert not re.search(r"(?:src|href|url\(|@import|<script|<link)", text)
    assert "http" not in text
    assert "&lt;b&gt;&amp;odd" in text
    assert "<b>&odd" not in text


def test_it_has_every_part_and_leaves_out_what_is_not_known(found):
    heads = re.findall(r"<h2>(.*?)</h2>", page(found))
    assert heads == [
        "All figures",
        "Loss",
        "Difference to fp32",
        "Bytes per parameter",
        "Time per step",
        "Updates that were kept, and elements that never moved",
        "How it was made",
    ]
    bare = found_of({name: [run(name, 0, losses(0))] for name in ("a", "b")})
    heads = re.findall(r"<h2>(.*?)</h2>", page(bare))
    assert heads == ["All figures", "Loss", "Difference to a"]


def test_the_band_is_drawn_where_the_figures_are(found):
    """By hand: differences of the seeds are 0.2, 0.4 and 0.6, t is 4.303, s is 0.2."""
    row = found["rows"][1]
    half = 4.303 * 0.2 / 3**0.5
    assert row["difference"]["mean"] == pytest.approx([0.4] * 20)
    assert row["difference"]["half"] == pytest.approx([half] * 20, rel=1e-4)
    assert row["against"]["low"] == pytest.approx(0.4 - half, rel=1e-4)
    outline = re.search(r'class="band" d="M([^"]*)Z"', page(found))
    assert outline
    points = [tuple(map(float, each.split(","))) for each in outline[1].split("L")]
    assert len(points) == 40
    middle = re.search(r'<path d="M([^"]*)" style="stroke:[^"]*;stroke-width:1.8"', page(found))
    assert middle
    line = [tuple(map(float, each.split(","))) for each in middle[1].split("L")]
    for (x, top), (_, y), (x2, bottom) in zip(points[:20], line, points[:19:-1], strict=True):
        assert x == x2
        assert 0 < top < y < bottom < 100


def test_the_heat_map_has_the_share_that_was_lost(found):
    text = page(found)
    cells = re.findall(r'class="lost" x="(\d+)" y="([\d.]+)"[^>]*fill-opacity="([\d.]+)"', text)
    # The first window of the norm kept 0.2, the second nothing; the other layer kept all.
    assert [(x, y, float(a)) for x, y, a in cells] == [("0", "0.04", 0.8), ("1", "0.04", 1.0)]
    assert "75%" in text
    assert "norm: 10% kept, 75% never moved" in text


def test_the_verdict_names_the_layer_that_stalls(found):
    assert not found["healthy"]
    (sentence,) = (each for each in found["sentences"] if "rounding" in each)
    assert "updates of blocks.0.norm (down to 10% kept)" in sentence
    assert headline(found) == "1 of 1 do not end where fp32 ends"


def test_bars_are_as_long_as_their_bytes(found):
    widths = [float(w) for w in re.findall(r"width:([\d.]+)%;background:var\(--r", page(found))]
    assert widths == [25, 25, 50, 0, 25, 25, 50, 0]


def test_many_layers_are_shown_by_their_kind():
    each = {"windows": [0.5, None], "survived": 0.5, "unmoved": 0.25}
    layers = {f"model.h.{n}.{part}": each for n in range(40) for part in ("qkv", "norm")}
    shown = layers_of(layers)
    assert set(shown) == {"h.*.qkv", "h.*.norm"}
    assert shown["h.*.qkv"] == each
    assert set(layers_of({"model.a": each, "model.b": each})) == {"a", "b"}


def test_labels_do_not_overlap(found):
    rows = {f"row {n}": [run(f"row {n}", 0, losses(0, 1e-5 * n))] for n in range(14)}
    text = page(found_of(rows))
    tops = sorted(float(top) for top in re.findall(r'class="t end" style="top:([\d.]+)px', text))
    assert len(tops) == 14
    assert all(b - a > 14.5 for a, b in pairwise(tops))


def test_a_precision_has_its_colour_on_every_page_and_rows_differ():
    names = ["32-true", "bf16-stochastic", *(f"peer {n}" for n in range(9))]
    assert len(set(colours(names, "32-true").values())) == len(names)
    ours = inks(names, "32-true")["bf16-stochastic"]
    assert inks(["bf16-true", "bf16-stochastic"], "bf16-true")["bf16-stochastic"] == ours


def test_a_row_that_broke_ends_where_it_did():
    rows = {"a": [run("a", 0, losses(0))]}
    rows["b"] = [run("b", 0, [*losses(0)[:7], float("nan")])]
    found = found_of(rows)
    assert len(found["rows"][1]["curve"]) == 7
    assert found["rows"][1]["difference"] is None
    assert tree(page(found)) is not None
    assert "no number" in page(found)
    rows["c"] = [run("c", 0, [float("nan")])]
    assert "c <b>no number</b>" in page(found_of(rows))


def test_a_large_metric_that_never_changes_is_drawn():
    rows = {name: [run(name, 0, [1e17] * 20)] for name in ("a", "b")}
    assert tree(page(found_of(rows))) is not None
