"""What training really allocates, for each recipe that docs/options.md has in its table."""

import json
import re
from pathlib import Path

import pytest
import torch
from torch import nn

import torch_bf16
from torch_bf16 import Recipe
from torch_bf16.gradients import gathering

DOCUMENT = Path(__file__).parents[2] / "docs" / "options.md"
ROW = re.compile(
    r"^\| `(Recipe\(.*?\))`(?P<release> with `release_gradients)?.* \| (\S+) \|$", re.M
)
RECIPES = {
    float(found[3]): (eval(found[1], {"Recipe": Recipe}), bool(found["release"]))
    for found in ROW.finditer(DOCUMENT.read_text())
}
WIDTH, DEPTH = 1024, 8


def model_of_8_million():
    """Matrices and norms; filled in place, because drawing 8 million numbers takes longer."""
    layers = []
    for _ in range(DEPTH):
        linear = nn.utils.skip_init(nn.Linear, WIDTH, WIDTH, bias=False, dtype=torch.bfloat16)
        layers += [linear, nn.LayerNorm(WIDTH, dtype=torch.bfloat16)]
    model = nn.Sequential(*layers)
    for number, parameter in enumerate(model.parameters()):
        nn.init.constant_(parameter, 0.01 * (1 + number % 3))
    return model


def train(recipe, release):
    """Two steps; returns how many parameters they were taken for."""
    model = model_of_8_million()
    optimizer = torch_bf16.AdamW(model.parameters(), lr=1e-3, recipe=recipe, backend="cpu")
    if release:
        torch_bf16.release_gradients(model, optimizer)
    for _ in range(2):
        model(torch.linspace(-1, 1, WIDTH, dtype=torch.bfloat16)).square().sum().backward()
        assert all((parameter.grad is None) == release for parameter in model.parameters())
        optimizer.step()
        optimizer.zero_grad()
    return sum(parameter.numel() for parameter in model.parameters())


def peak_of(function, trace):
    """The most bytes of torch's tensors that lived together, and what the function returned."""
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True, acc_events=True
    ) as profiler:
        result = function()
    profiler.export_chrome_trace(str(trace))
    events = json.loads(trace.read_text(errors="replace"))["traceEvents"]
    changes = sorted(
        (event["ts"], event["args"]["Ev Idx"], event["args"]["Bytes"])
        for event in events
        if event.get("name") == "[memory]" and event["args"]["Device Type"] == 0
    )
    held = peak = 0
    for _, _, size in changes:
        held += size
        peak = max(peak, held)
    return peak, result


def test_the_table_has_every_size():
    assert list(RECIPES) == [16, 14, 12, 10, 9, 8, 7.2, 6.2, 4.2]
    assert [size for size, (_, release) in RECIPES.items() if release] == [4.2]


@pytest.mark.parametrize("size", RECIPES)
def test_peak_of_allocated_bytes_per_parameter(size, tmp_path, monkeypatch):
    """Weights, gradients and states of 8 million parameters, and all else that a step needs."""
    monkeypatch.setattr(gathering, "LIMIT", gathering.LIMIT // 4)
    recipe, release = RECIPES[size]
    gradient = 0 if release else 2
    assert recipe.bytes_per_parameter + gradient == pytest.approx(size, rel=0.02)
    peak, parameters = peak_of(lambda: train(recipe, release), tmp_path / "trace.json")
    assert 8e6 < parameters < 8.5e6
    # Gradients that wait to be released share a kernel call.
    waiting = gathering.LIMIT if release else 0
    assert peak - waiting == pytest.approx(size * parameters, rel=0.02)
