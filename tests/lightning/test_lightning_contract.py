"""What Lightning expects of any precision plugin, as its own tests of plugins ask for it.

Contexts that raise are in test_lightning_numerics.py.
"""

from __future__ import annotations

import ast
import importlib
import itertools
from collections import namedtuple
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from lightning_models import batches, host, make_module, make_trainer
from torch import nn
from torch.nn import functional as F

import lightning_bf16
import torch_bf16
from torch_bf16.model import remainders

FAMILIES = ("pytorch", "fabric", "pytorch_lightning", "lightning_fabric")
Pair = namedtuple("Pair", "x n")


@pytest.fixture(params=FAMILIES)
def plugin_class(request):
    return host(f"lightning_bf16.{request.param}").BF16Precision


@pytest.mark.parametrize(
    ("ours", "package", "twin"),
    [
        ("fabric", "lightning.fabric", "lightning_fabric"),
        ("pytorch", "lightning.pytorch", "pytorch_lightning"),
    ],
)
def test_the_plugins_of_both_packages_are_the_same_lines(ours, package, twin):
    folder = Path(lightning_bf16.__file__).parent
    one, other = ((folder / f"{name}.py").read_text() for name in (ours, twin))
    assert ast.dump(ast.parse(one.replace(package, twin))) == ast.dump(ast.parse(other))


def test_convert_module_casts_in_place_and_keeps_identity_and_frozen_parameters(plugin_class):
    module = nn.Sequential(nn.Linear(2, 2), nn.ModuleDict({"norm": nn.BatchNorm1d(2)}))
    module[0].bias.requires_grad_(False)
    before = list(module.parameters())
    assert plugin_class("bf16-fp32-master").convert_module(module) is module
    assert all(a is b for a, b in zip(before, module.parameters(), strict=True))
    assert [p.dtype for p in module[0].parameters()] == [torch.bfloat16] * 2
    assert [p.requires_grad for p in module[0].parameters()] == [True, False]
    assert {b.dtype for b in module.buffers()} == {torch.float32, torch.int64}


def test_convert_input_and_output_reach_into_collections_and_leave_other_dtypes(plugin_class):
    floats = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
    data = {"pair": Pair([torch.ones(1, dtype=each) for each in floats], torch.tensor([1])), "s": 0}
    same = plugin_class().convert_input(data)
    assert all(a is b for a, b in zip(same["pair"].x, data["pair"].x, strict=True))
    cast = plugin_class(compute="bf16").convert_input(data)
    assert {each.dtype for each in cast["pair"].x} == {torch.bfloat16}
    back = plugin_class().convert_output(cast)
    assert {each.dtype for each in back["pair"].x} == {torch.float32}
    for each in (cast, back):
        assert isinstance(each["pair"], Pair)
        assert (each["pair"].n.dtype, each["s"]) == (torch.int64, 0)
    mask = torch.tensor([True])
    assert plugin_class(compute="bf16").convert_input(mask) is mask


def test_a_precision_and_a_plugin_together_are_the_hosts_own_error(pl):
    family = "pytorch" if pl.__name__ == "lightning.pytorch" else pl.__name__
    plugin = host(f"lightning_bf16.{family}").BF16Precision()
    with pytest.raises(ValueError, match="Received both `precision=bf16-stochastic` and `plugins="):
        make_trainer(pl, "bf16-stochastic", plugins=[plugin])


@pytest.mark.filterwarnings("ignore:`training_step` returned `None`")
def test_a_training_step_that_returns_nothing_is_skipped(pl, mode):
    weights = []

    def training_step(self, batch, batch_idx):
        weights.append(self.net[0].weight.detach().clone())
        return F.cross_entropy(self(batch[0]), batch[1]) if batch_idx % 2 else None

    def configure_optimizers(self):
        self.made = [torch.optim.SGD(self.parameters(), lr=0.5)]
        return self.made[0]

    hooks = {"training_step": training_step, "configure_optimizers": configure_optimizers}
    module = make_module(pl, **hooks)
    trainer = make_trainer(pl, mode, gradient_clip_val=0.5)
    trainer.fit(module, batches(6))
    weights.append(module.net[0].weight)
    changed = [not torch.equal(a, b) for a, b in itertools.pairwise(weights)]
    assert changed == [False, True] * 3


def test_a_step_that_the_user_leaves_out_leaves_no_clipping_behind(pl, mode):
    coefficients = []

    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
        if batch_idx % 2:
            optimizer.step(closure=optimizer_closure)
        else:
            optimizer_closure()

    def on_before_optimizer_step(self, optimizer):
        coefficients.append(float(optimizer._engine.pending.coefficient))

    hooks = {
        "optimizer_step": optimizer_step,
        "on_before_optimizer_step": on_before_optimizer_step,
    }
    module = make_module(pl, **hooks)
    make_trainer(pl, mode, gradient_clip_val=0.01).fit(module, batches(4))
    # Lightning clips within what precision plugins make of a step, which here runs twice.
    assert coefficients == [1.0, 1.0]


KINDS = {
    "StepLR": ({"step_size": 2, "gamma": 0.5}, "step"),
    "MultiStepLR": ({"milestones": [1], "gamma": 0.5}, "epoch"),
    "LambdaLR": ({"lr_lambda": lambda step: 1 / (step + 1)}, "step"),
    "MultiplicativeLR": ({"lr_lambda": lambda step: 0.9}, "step"),
    "LinearLR": ({"start_factor": 0.1, "total_iters": 4}, "step"),
    "ExponentialLR": ({"gamma": 0.9}, "epoch"),
    "PolynomialLR": ({"total_iters": 6, "power": 2.0}, "step"),
    "CosineAnnealingLR": ({"T_max": 6}, "step"),
    "CosineAnnealingWarmRestarts": ({"T_0": 2}, "step"),
    "CyclicLR": ({"base_lr": 0.01, "max_lr": 0.1, "step_size_up": 2}, "step"),
    "OneCycleLR": ({"max_lr": 0.1, "total_steps": 8}, "step"),
    "ReduceLROnPlateau": ({"factor": 0.5, "patience": 0}, "epoch"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_scheduler_of_every_kind_drives_rates_and_momenta_as_in_32_true(kind):
    options, interval = KINDS[kind]
    pl = host("lightning.pytorch")
    seen = []

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        scheduler = getattr(torch.optim.lr_scheduler, kind)(optimizer, **options)
        config = {"scheduler": scheduler, "interval": interval, "monitor": "flat"}
        return {"optimizer": optimizer, "lr_scheduler": config}

    def training_step(self, batch, batch_idx):
        self.log("flat", 1.0)
        return F.cross_entropy(self(batch[0]), batch[1])

    def on_train_batch_start(self, *_):
        group = self.trainer.optimizers[0].param_groups[0]
        seen[-1].append((group["lr"], group["momentum"]))

    hooks = {
        "configure_optimizers": configure_optimizers,
        "training_step": training_step,
        "on_train_batch_start": on_train_batch_start,
    }
    for precision in ("32-true", "bf16-stochastic"):
        seen.append([])
        trainer = make_trainer(pl, precision, max_epochs=4)
        trainer.fit(make_module(pl, **hooks), batches(2))
    assert isinstance(trainer.optimizers[0], torch_bf16.SGD)
    assert seen[0] == seen[1]
    assert len({rate for rate, _ in seen[1]}) > 1


def test_parameters_that_are_unfrozen_later_join_the_converted_optimizer(pl, mode):
    callbacks = importlib.import_module(f"{pl.__name__}.callbacks")

    class Unfreeze(callbacks.BaseFinetuning):
        def freeze_before_training(self, pl_module):
            self.freeze(pl_module.net[0])

        def finetune_function(self, pl_module, epoch, optimizer):
            if epoch == 1:
                self.unfreeze_and_add_param_group(pl_module.net[0], optimizer, lr=0.1)

    firsts = []

    def configure_optimizers(self):
        trained = [p for p in self.parameters() if p.requires_grad]
        self.made = [torch.optim.AdamW(trained, lr=1e-2)]
        return self.made[0]

    def on_train_epoch_end(self):
        firsts.append(self.net[0].weight.detach().clone())

    hooks = {
        "configure_optimizers": configure_optimizers,
        "on_train_epoch_end": on_train_epoch_end,
    }
    module = make_module(pl, **hooks)
    drawn = module.net[0].weight.detach().clone()
    trainer = make_trainer(pl, mode, max_epochs=2, callbacks=[Unfreeze()])
    trainer.fit(module, batches(3))
    assert torch.equal(firsts[0], drawn.bfloat16())
    assert not torch.equal(firsts[1], firsts[0])
    assert len(module.made[0].param_groups) == 2
    state = module.made[0].state[module.net[0].weight]
    assert int(state["step"]) == 3
    assert state.keys() == module.made[0].state[module.net[3].weight].keys()


# The attribute of the Trainer's strategy, and of Fabric's.
@pytest.mark.parametrize("attribute", ["kwargs", "_fsdp_kwargs"])
@pytest.mark.parametrize("sent", [False, True])
def test_masters_follow_the_weights_that_fsdp1_sends(plugin_class, monkeypatch, attribute, sent):
    """FSDP1 sends them on devices alone."""
    synced = []
    monkeypatch.setattr(remainders, "sync_masters", synced.append)
    strategy, module = SimpleNamespace(**{attribute: {"sync_module_states": sent}}), nn.Linear(2, 2)
    plugin_class().sync_masters(module, strategy)
    assert synced == []
    module.weight._fsdp_flattened = True  # as FSDP1 marks what it has wrapped
    plugin_class().sync_masters(module, strategy)
    assert synced == [module] * sent


@pytest.mark.parametrize(
    ("compute", "casts"), [("autocast", False), ("fp32", False), ("bf16", True)]
)
def test_fsdp1_reduces_in_fp32_and_casts_inputs_where_all_is_bf16(plugin_class, compute, casts):
    found = plugin_class(compute=compute).mixed_precision_config
    assert (found.param_dtype, found.reduce_dtype) == (None, torch.float32)
    assert (found.cast_forward_inputs, found.cast_root_forward_inputs) == (casts, casts)
