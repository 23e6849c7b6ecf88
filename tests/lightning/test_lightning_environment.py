"""``BF16_MODE`` and the variables of its options, for scripts that stay as they are."""

from __future__ import annotations

import os

import pytest
from lightning_models import batches, host, make_module, make_trainer

import lightning_bf16
import torch_bf16


@pytest.fixture
def variables(monkeypatch):
    def set_all(**values):
        for name, value in values.items():
            monkeypatch.setenv(name, value)

    return set_all


def plugins_of(pl):
    return host(f"lightning_bf16.{pl.__name__.rpartition('.')[2]}")


def fitted(pl, precision, **options):
    trainer, module = make_trainer(pl, precision, **options), make_module(pl)
    trainer.fit(module, batches(2))
    return trainer, module


@pytest.mark.parametrize("precision", [None, 32, "bf16-mixed", "bf16-true"])
def test_the_mode_takes_the_place_of_a_precision(pl, mode, variables, caplog, precision):
    _, meant = fitted(pl, mode)
    variables(BF16_MODE=mode)
    with caplog.at_level("INFO"):
        trainer, module = fitted(pl, precision)
    assert trainer.precision_plugin.mode == mode
    own = {None: "32-true", 32: "32-true"}.get(precision, precision)
    assert f"precision={own!r} in the script becomes {mode!r}: BF16_MODE={mode}" in caplog.text
    for one, other in zip(meant.parameters(), module.parameters(), strict=True):
        assert one.equal(other)


def test_fabric_obeys_too(fabric_package, mode, variables):
    variables(BF16_MODE=mode)
    fabric = fabric_package.Fabric(accelerator="cpu", devices=1, precision="bf16-mixed")
    assert fabric._precision.mode == mode


def test_naming_the_same_mode_is_no_conflict(pl, mode, variables, caplog):
    variables(BF16_MODE=mode)
    plugin = plugins_of(pl).BF16Precision(mode, seed=3)
    with caplog.at_level("INFO"):
        assert make_trainer(pl, mode).precision_plugin.mode == mode
        assert make_trainer(pl, None, plugins=[plugin]).precision_plugin is plugin
    assert "becomes" not in caplog.text


@pytest.mark.parametrize("precision", ["16-true", "64-true", "bf16-fp32-master"])
def test_what_the_script_means_otherwise_is_refused(pl, variables, precision):
    variables(BF16_MODE="bf16-stochastic")
    said = f"BF16_MODE=bf16-stochastic cannot take the place of precision='{precision}'"
    with pytest.raises(ValueError, match=said):
        make_trainer(pl, precision)


def test_a_plugin_of_the_script_is_refused(pl, variables):
    variables(BF16_MODE="bf16-stochastic")
    stock = pl.plugins.precision.MixedPrecision("bf16-mixed", "cpu")
    ours = plugins_of(pl).BF16Precision(torch_bf16.Recipe("6.2", exp_avg="int8", exp_avg_sq="int8"))
    for plugin, name in ((stock, "MixedPrecision"), (ours, "BF16Precision")):
        with pytest.raises(ValueError, match=f"cannot take the place of the plugin {name}"):
            make_trainer(pl, None, plugins=[plugin])


def test_a_mode_that_is_none_is_refused(pl, variables):
    variables(BF16_MODE="bf16_stochastic")
    with pytest.raises(ValueError, match="BF16_MODE='bf16_stochastic' is not one of the modes"):
        make_trainer(pl, "32-true")


def test_options_come_from_the_environment_unless_the_script_says(pl, variables):
    variables(BF16_WEIGHTS="bf16+8", BF16_SEED="11", BF16_KEEP_FP32="head, *.norm")
    recipe = make_trainer(pl, "bf16-stochastic").precision_plugin.recipe
    assert (recipe.weights, recipe.seed, recipe.keep_fp32) == ("bf16+8", 11, ("head", "*.norm"))
    plugin = lightning_bf16.BF16Precision(seed=5, keep_fp32=["body"])
    assert (plugin.recipe.weights, plugin.recipe.seed) == ("bf16+8", 5)
    assert plugin.recipe.keep_fp32 == ("body",)
    assert lightning_bf16.BF16Precision(keep_fp32=[]).recipe.keep_fp32 == ()
    whole = torch_bf16.Recipe("whole")
    assert lightning_bf16.BF16Precision(whole).recipe is whole


def test_gradients_are_released_by_the_environment(variables):
    variables(BF16_RELEASE_GRADIENTS="1", BF16_RELEASE_MAX_NORM="0.5")
    plugin = lightning_bf16.BF16Precision()
    assert (plugin.release.max_norm, plugin.release.norm) == (0.5, "parameter")
    variables(BF16_RELEASE_GRADIENTS="0")
    with pytest.raises(ValueError, match=r"release_max_norm=0\.5 is for released gradients"):
        lightning_bf16.BF16Precision()


def test_switched_off_but_meant_fails(unhooked):
    code = """
import lightning
for host in (lightning.Trainer, lightning.Fabric):
    try:
        host(accelerator="cpu", devices=1)
    except RuntimeError as error:
        print(error)
"""
    environment = {**os.environ, "BF16_AUTOLOAD": "0", "BF16_MODE": "bf16-stochastic"}
    done = unhooked.run(code, **environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("BF16_MODE=bf16-stochastic was asked for, but BF16_AUTOLOAD=0") == 2
    assert done.stdout.count("import lightning_bf16 in the script") == 2


def test_switched_off_and_meant_for_accelerate_alone_a_host_has_its_own_precision(unhooked):
    code = """
import lightning
options = {"accelerator": "cpu", "devices": 1, "precision": "bf16-true"}
print(type(lightning.Fabric(**options).strategy.precision).__name__)
print(type(lightning.Trainer(**options).strategy.precision_plugin).__name__)
"""
    variables = {"BF16_AUTOLOAD": "0", "ACCELERATE_MIXED_PRECISION": "bf16-stochastic"}
    done = unhooked.run(code, **{**os.environ, **variables})
    assert done.stdout.split()[-2:] == ["HalfPrecision"] * 2, done.stderr
