"""The names are known by import, and without one in a fresh process.

Here a process calls the hook as torch does at its import. That torch does, real starts show:
``fabric_app.py`` for Fabrics and ``launches.py`` for Trainers.
"""

from __future__ import annotations

import os

import pytest

import lightning_bf16.modes
import torch_bf16

MAKE = """
import {pl}, {fabric}
for mode in ("bf16-stochastic", "bf16-fp32-master"):
    trainer = {pl}.Trainer(
        accelerator="cpu", precision=mode, logger=False, enable_checkpointing=False
    )
    assert type(trainer.precision_plugin).__name__ == "BF16Precision", trainer.precision_plugin
    fabric = {fabric}.Fabric(accelerator="cpu", devices=1, precision=mode)
    assert type(fabric._precision).__name__ == "BF16Precision", fabric._precision
    assert {fabric}.Fabric.setup.__wrapped__
"""


@pytest.fixture
def run(unhooked):
    """Runs a program with these variables besides those of the tests."""
    clean = {k: v for k, v in os.environ.items() if k != "BF16_AUTOLOAD"}
    return lambda code, **environment: unhooked.run(code, **{**clean, **environment})


def test_an_installed_wheel_needs_no_import(run):
    code = MAKE.format(pl="lightning.pytorch", fabric="lightning.fabric")
    code += MAKE.format(pl="pytorch_lightning", fabric="lightning_fabric")
    code += "import sys; assert 'accelerate' not in sys.modules"
    done = run(code)
    assert done.returncode == 0, done.stderr


def test_bf16_autoload_0_turns_it_off_and_a_late_import_turns_it_on(run):
    code = """
import sys, lightning.pytorch, lightning.fabric
assert not any(name.startswith(("torch_bf16", "lightning_bf16")) for name in sys.modules)
try:
    lightning.pytorch.Trainer(accelerator="cpu", precision="bf16-stochastic")
except ValueError as error:
    assert "is invalid" in str(error)
else:
    raise SystemExit("it was not off")
import lightning_bf16
"""
    code += MAKE.format(pl="lightning.pytorch", fabric="lightning.fabric")
    done = run(code, BF16_AUTOLOAD="0")
    assert done.returncode == 0, done.stderr


def test_a_run_without_a_mode_imports_none_of_the_core(run, tmp_path):
    code = """
import sys, torch, lightning
from lightning.pytorch.demos.boring_classes import BoringModel
options = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False}
trainer = lightning.Trainer(max_steps=1, enable_model_summary=False, **options)
trainer.fit(BoringModel())
trainer.save_checkpoint("boring.ckpt")
fabric = lightning.Fabric(accelerator="cpu", devices=1)
net = torch.nn.Linear(2, 2)
net, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters()))
fabric.backward(net(torch.ones(1, 2)).sum())
fabric.clip_gradients(net, optimizer, max_norm=1.0)
optimizer.step()
assert "lightning_bf16" in sys.modules
assert "__subclasses__" not in vars(torch.optim.Optimizer)
assert not any(name.startswith(("torch_bf16", "numba")) for name in sys.modules)
"""
    done = run(code, folder=tmp_path)
    assert done.returncode == 0, done.stderr


def test_the_names_are_those_of_the_recipes():
    assert (*torch_bf16.RECIPES,) == lightning_bf16.modes.MODES


def test_the_mixin_may_be_imported_before_any_host(run):
    """Patches refer to it, and it to them."""
    done = run("import lightning_bf16.precision", BF16_AUTOLOAD="0")
    assert done.returncode == 0, done.stderr


def test_an_import_before_the_host_works_with_pytorch_lightning_alone_and_no_entry_points(run):
    code = """
import sys
sys.modules["lightning"] = None  # as if it were not installed
import lightning_bf16
assert "pytorch_lightning" not in sys.modules
"""
    code += MAKE.format(pl="pytorch_lightning", fabric="lightning_fabric")
    code += "assert lightning_bf16.BF16Precision is type(trainer.precision_plugin)\n"
    done = run(code, TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert done.returncode == 0, done.stderr


def test_unregistering_puts_lightning_back_as_it_was_until_it_is_registered_again(run):
    code = """
import typing
from lightning.fabric import Fabric
from lightning.fabric.connector import _PRECISION_INPUT_STR, _Connector
from lightning.pytorch import Trainer
from lightning.pytorch.trainer.connectors.accelerator_connector import _AcceleratorConnector
changed = [(_PRECISION_INPUT_STR, "__args__")]
changed += [(each, "_check_and_init_precision") for each in (_Connector, _AcceleratorConnector)]
changed += [(Fabric, "clip_gradients"), (Fabric, "setup"), (Fabric, "setup_module")]
changed += [(Fabric, "setup_optimizers"), (Trainer, "save_checkpoint")]
def found():
    return [getattr(owner, name) for owner, name in changed]
stock = found()
import lightning_bf16, lightning_bf16.fabric
ours = found()
assert not any(a is b for a, b in zip(stock, ours))
for _ in range(2):
    lightning_bf16.unregister()
    assert all(a is b for a, b in zip(stock, found()))
import pytorch_lightning, lightning_bf16.lightning_fabric
for package in (pytorch_lightning, __import__("lightning.pytorch").pytorch):
    try:
        package.Trainer(accelerator="cpu", precision="bf16-stochastic")
    except ValueError as error:
        assert "is invalid" in str(error)
    else:
        raise SystemExit("it is registered")
lightning_bf16.register()
ours = found()
assert not any(a is b for a, b in zip(stock, ours))
lightning_bf16.register()
assert all(a is b for a, b in zip(ours, found()))
"""
    code += MAKE.format(pl="lightning.pytorch", fabric="lightning.fabric")
    code += MAKE.format(pl="pytorch_lightning", fabric="lightning_fabric")
    done = run(code, BF16_AUTOLOAD="0")
    assert done.returncode == 0, done.stderr


def test_a_broken_plugin_breaks_neither_torch_nor_the_host(run):
    code = """
import sys, warnings
sys.modules["lightning_bf16"] = None
import torch
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import lightning.pytorch
ours = [str(w.message) for w in caught if "lightning_bf16" in str(w.message)]
assert len(ours) == 1 and "BF16_AUTOLOAD=0" in ours[0], ours
lightning.pytorch.Trainer(accelerator="cpu", precision="bf16-true", logger=False)
"""
    done = run(code)
    assert done.returncode == 0, done.stderr


def test_torch_alone_imports_nothing_of_ours_but_the_hook(run):
    code = """
import sys, torch
assert "bf16_autoload" in sys.modules
found = [n for n in sys.modules if n.split(".")[0] in ("torch_bf16", "lightning_bf16", "lightning")]
assert not found, found
"""
    done = run(code)
    assert done.returncode == 0, done.stderr
