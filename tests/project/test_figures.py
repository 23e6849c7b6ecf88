"""The figures of the documentation: each is there, and what pages say of them is what they show."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

from torch_bf16 import numerics

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture(scope="module")
def figures() -> ModuleType:
    pytest.importorskip("matplotlib")
    spec = importlib.util.spec_from_file_location("figures", DOCS / "figures.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def page() -> str:
    """The page on numerics, in one line."""
    return " ".join((DOCS / "numerics.md").read_text().split())


def test_every_figure_is_there_in_both_styles(figures: ModuleType) -> None:
    wanted = {f"{name}-{style}.svg" for name in figures.FIGURES for style in figures.STYLES}
    assert wanted == {path.name for path in (DOCS / "figures").glob("*.svg")}


@pytest.mark.parametrize("name", ["bytes", "gpu-steps", "learning-rates", "loss-curves"])
def test_a_record_is_drawn_without_anything_of_the_day(
    figures: ModuleType, name: str, tmp_path: Path
) -> None:
    for folder in ("first", "second"):
        figures.main([name, "--folder", str(tmp_path / folder)])
    for style in figures.STYLES:
        first, second = ((tmp_path / f / f"{name}-{style}.svg") for f in ("first", "second"))
        assert first.read_bytes() == second.read_bytes()
        assert "<svg" in first.read_text()


@pytest.mark.parametrize("name", ["bytes", "gpu-steps"])
def test_the_numbers_of_a_figure_are_those_of_the_newest_record(
    figures: ModuleType, name: str, tmp_path: Path
) -> None:
    """Otherwise: python docs/figures.py, as after each ``make gpu``."""
    figures.main([name, "--folder", str(tmp_path)])
    for style in figures.STYLES:
        path = f"{name}-{style}.svg"
        drawn, committed = ((folder / path).read_text() for folder in (tmp_path, figures.FOLDER))
        words = re.findall(r"<text[^>]*>([^<]+)</text>", drawn)
        assert len(words) > 10
        assert words == re.findall(r"<text[^>]*>([^<]+)</text>", committed)


def test_a_figure_that_there_is_not_is_refused_by_name(figures: ModuleType, capsys) -> None:
    with pytest.raises(SystemExit):
        figures.main(["bytes", "nix"])
    assert "no figure is called nix; there are thousand-additions, " in capsys.readouterr().err


def test_noise_over_drift_is_what_the_page_says(figures: ModuleType) -> None:
    said = re.search(r"([\d.]+) after 1 spacing, ([\d.]+) after 16, ([\d.]+) after 50", page())
    measured, formula = figures.noise_over_drift(np.array([1, 16, 50]))
    assert [f"{ratio:.2f}" for ratio in measured] == list(said.groups())
    assert np.allclose(measured, formula, rtol=0.03)


def test_second_moments_are_what_the_page_says(figures: ModuleType) -> None:
    found = figures.second_moments()
    text = page()
    exact, nearest, rounded = found.values()
    assert f"fp32 holds {exact[999]:.3f} and bf16 to nearest {nearest[999]:.2f}" in text
    assert f"fp32 has come down to {exact[-1]:.3f}" in text
    assert rounded[-1] == pytest.approx(exact[-1], rel=0.01)
    assert nearest[-1] == nearest[999]


def test_first_moments_are_what_the_page_says() -> None:
    said = re.search(
        r"it stops at ([\d.]+), ([\d.]+) and ([\d.]+) for .* of 0.99, 0.995 and 0.999\.", page()
    )
    ends = []
    for beta in (0.99, 0.995, 0.999):
        mean = torch.zeros(1)
        for _ in range(3000):
            mean = numerics.bf16_nearest(mean + (1 - mean) * (1 - beta)).float()
        ends.append(f"{mean.item():.2f}")
    assert ends == list(said.groups())
    varied, generator = torch.zeros(4096), torch.Generator().manual_seed(0)
    for _ in range(6000):
        gradient = 1 + torch.randn(4096, generator=generator)
        varied = numerics.bf16_nearest(varied + (gradient - varied) * 0.001).float()
    assert 0.95 < varied.mean().item() < 1.0
