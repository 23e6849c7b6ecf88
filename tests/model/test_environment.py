"""What the environment says of a run is read, or refused by name."""

from __future__ import annotations

import dataclasses
import inspect
import re
from pathlib import Path

import pytest

from accelerate_bf16 import BF16RecipeKwargs
from lightning_bf16.fabric import BF16Precision
from torch_bf16.environment import OPTIONS, mode_from_environment, options_from_environment


def test_options_are_read():
    variables = {
        "BF16_KEEP_FP32": "head, *.router,",
        "BF16_RELEASE_GRADIENTS": "yes",
        "BF16_RELEASE_MAX_NORM": "0.5",
        "BF16_SEED": "7",
        "BF16_WEIGHTS": " ",
    }
    assert options_from_environment(variables) == {
        "keep_fp32": ("head", "*.router"),
        "release_gradients": True,
        "release_max_norm": 0.5,
        "seed": 7,
    }


# Of the plugin itself: which recipe, and what only a Trainer knows of a release.
LIGHTNING_ALONE = {"self", "recipe", "release_accumulation_steps"}
IN_BOTH = [each.name for each in dataclasses.fields(BF16RecipeKwargs)]


def test_both_plugins_have_the_options_that_have_a_variable():
    of_lightning = inspect.signature(BF16Precision.__init__).parameters.keys()
    assert {*OPTIONS.values()} == {*IN_BOTH}, "see BF16RecipeKwargs (accelerate_bf16)"
    assert {*OPTIONS.values()} == of_lightning - LIGHTNING_ALONE, "see lightning_bf16/precision.py"


def test_the_page_of_options_has_a_row_for_each_with_its_variable():
    page = (Path(__file__).parents[2] / "docs" / "options.md").read_text()
    _, _, table = page.partition("## All options")
    rows = [line.split("|")[1:3] for line in table.split("\n\n")[1].splitlines()[2:]]
    found = {}
    for names, variables in rows:
        named = re.findall(r"`(\w+)`", re.sub(r"\(.*\)", "", names))
        found |= dict(zip(re.findall(r"`(\w+)`", variables), named, strict=False))
    assert found == OPTIONS, "the table of docs/options.md"


def test_what_cannot_be_read_is_refused():
    with pytest.raises(ValueError, match=r"BF16_SEED='1\.5' must be a whole number"):
        options_from_environment({"BF16_SEED": "1.5"})
    with pytest.raises(ValueError, match="BF16_COMPUTE: compute='fp16' is unknown; use one of"):
        options_from_environment({"BF16_COMPUTE": "fp16"})
    with pytest.raises(ValueError, match="BF16_RELEASE_GRADIENTS='maybe' must be one of 1, true"):
        options_from_environment({"BF16_RELEASE_GRADIENTS": "maybe"})


def test_a_misspelt_variable_is_warned_of_and_somebody_elses_is_not():
    with pytest.warns(UserWarning, match="BF16_WIEGHTS is set, and nothing reads it; BF16_WEIGHTS"):
        assert options_from_environment({"BF16_WIEGHTS": "bf16+8"}) == {}
    assert options_from_environment({"BF16_TRAINING": "1", "BF16_MODE": "bf16-stochastic"}) == {}


@pytest.mark.parametrize(
    ("value", "mode"),
    [
        ("", None),
        (" ", None),
        ("BF16-FP32-Master", "bf16-fp32-master"),
    ],
)
def test_a_mode_is_read(value, mode):
    assert mode_from_environment({"BF16_MODE": value}) == mode


def test_another_mode_is_refused():
    with pytest.raises(ValueError, match=r"BF16_MODE='bf16' is not one of the modes of torch-bf16"):
        mode_from_environment({"BF16_MODE": "bf16"})
