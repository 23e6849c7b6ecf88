"""Requests that cannot be met say what was asked, why not, and what works instead."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from foreign_cases import sparse_and_dense
from lightning_models import FABRICS, TRAINERS, batches, host, make_module, make_trainer

import lightning_bf16
import torch_bf16
from lightning_bf16 import _patches


def fit_with(pl, configure_optimizers):
    module = make_module(pl, configure_optimizers=configure_optimizers)
    make_trainer(pl, "bf16-stochastic").fit(module, batches(1))


def test_an_unknown_precision_gives_lightnings_own_error_with_our_names(pl):
    names = ", ".join(f"'{name}'" for name in torch_bf16.RECIPES)
    with pytest.raises(ValueError, match=f"'bf16-stochastc' is invalid.*{names}"):
        make_trainer(pl, "bf16-stochastc")


def test_an_unknown_mode_lists_the_known_ones():
    with pytest.raises(ValueError, match=r"unknown recipe 'bf16'.*bf16-fp32-master"):
        lightning_bf16.BF16Precision("bf16")


def test_an_unknown_compute_lists_the_known_ones():
    with pytest.raises(
        ValueError, match="compute='fp8' is unknown; use one of autocast, fp32, bf16"
    ):
        lightning_bf16.BF16Precision(compute="fp8")


@pytest.mark.parametrize("name", ["SparseAdam", "LBFGS"])
def test_an_unsupported_optimizer_is_refused_before_training(pl, name):
    def configure_optimizers(self):
        return getattr(torch.optim, name)(self.parameters())

    said = (
        rf"precision='bf16-stochastic': .*{name} cannot be converted: .*(Train with|Make the em)"
        ".*precision='32-true' or 'bf16-mixed' .* your module are bf16 by now"
    )
    with pytest.raises(NotImplementedError, match=said):
        fit_with(pl, configure_optimizers)


def test_fabric_leaves_an_optimizer_of_fp32_parameters_as_it_is(fabric_package):
    net, (sparse, dense) = sparse_and_dense()
    family = fabric_package.__name__.rpartition(".")[2]
    plugin = host(f"lightning_bf16.{family}").BF16Precision(keep_fp32=["0"], compute="fp32")
    fabric = fabric_package.Fabric(accelerator="cpu", plugins=[plugin])
    model, *wrapped = fabric.setup(net, sparse, dense)
    fabric.backward(model(torch.tensor([1])).square().mean())
    for each in wrapped:
        each.step()
    assert type(sparse) is torch.optim.SparseAdam
    assert isinstance(dense, torch_bf16.AdamW)


@pytest.mark.parametrize("name", ["SparseAdam", "LBFGS"])
def test_fabric_refuses_an_optimizer_before_it_casts_anything(fabric_package, mode, name):
    net = torch.nn.Linear(4, 4)
    optimizers = torch.optim.AdamW([net.bias]), getattr(torch.optim, name)([net.weight])
    fabric = fabric_package.Fabric(accelerator="cpu", precision=mode)
    said = rf"precision='{mode}': .*{name} cannot be converted: .*'bf16-mixed' .*was trained$"
    with pytest.raises(NotImplementedError, match=said):
        fabric.setup(net, *optimizers)
    assert {p.dtype for p in net.parameters()} == {torch.float32}
    assert type(optimizers[0]) is torch.optim.AdamW


def test_a_wrapper_around_an_optimizer_trains_by_the_advice_of_its_refusal(pl, mode):
    class Lookahead(torch.optim.Optimizer):
        def __init__(self, base):
            super().__init__(base.param_groups, {})
            self.base = base

        def step(self, closure=None):
            return self.base.step(closure)

    def wrapped(self):
        return Lookahead(torch.optim.SGD(self.parameters(), lr=0.5))

    def advised(self):
        optimizer = wrapped(self)
        torch_bf16.convert(optimizer.base, mode, model=self)
        return optimizer

    with pytest.raises(NotImplementedError, match=r"torch_bf16.convert\(optimizer.base, recipe"):
        fit_with(pl, wrapped)
    module = make_module(pl, configure_optimizers=advised)
    make_trainer(pl, mode).fit(module, batches(2))
    assert module.net[0].weight.dtype == torch.bfloat16


OTHERS = [
    ("bf16-stochastic", "bf16-fp32-master", {}, r"weights is 'bf16\+16' there and 'bf16_st"),
    ("bf16-fp32-master", "bf16-stochastic", {}, "exp_avg is 'bf16_nearest' there and 'fp32'"),
    ("bf16-stochastic", "bf16-stochastic", {"keep_fp32": ("net",)}, r"keep_fp32 is \('net',\)"),
]


@pytest.mark.parametrize(("mode", "recipe", "options", "said"), OTHERS)
def test_an_optimizer_that_was_made_with_another_recipe_is_refused(mode, recipe, options, said):
    """Its masters would start from rounded weights, or what the plugin was asked for be lost."""

    def configure_optimizers(self):
        own = torch_bf16.get_recipe(recipe, **options)
        return torch_bf16.AdamW(self.parameters(), recipe=own)

    module = make_module(host(TRAINERS[0]), configure_optimizers=configure_optimizers)
    advice = r".* recipe=self\.trainer\.precision_plugin\.recipe, .*by now: create or load it again"
    said = f"^precision='{mode}': this AdamW was made with recipe '{recipe}'.* {said}"
    with pytest.raises(ValueError, match=said + advice):
        make_trainer(host(TRAINERS[0]), mode).fit(module, batches(1))

    net = torch.nn.Linear(4, 4)
    optimizer = configure_optimizers(net)
    fabric = host(FABRICS[0]).Fabric(accelerator="cpu", precision=mode)
    with pytest.raises(ValueError, match=said + r".* recipe=fabric\..*Nothing was trained$"):
        fabric.setup(net, optimizer)
    assert {p.dtype for p in net.parameters()} == {torch.float32}
    fabric.setup_module(net)
    with pytest.raises(ValueError, match=said):
        fabric.setup_optimizers(optimizer)


def test_an_option_that_an_optimizer_cannot_have_leaves_one_word_on_what_was_changed():
    """That nothing was changed holds for the optimizer, and not for the module."""

    class OwnSGD(torch.optim.SGD):
        def step(self, closure=None):
            return super().step(closure)

    def configure_optimizers(self):
        return OwnSGD(self.parameters(), lr=0.1)

    module = make_module(host(TRAINERS[0]), configure_optimizers=configure_optimizers)
    plugin = lightning_bf16.BF16Precision(offload="states")
    with pytest.raises(NotImplementedError, match="Leave offload out") as refused:
        make_trainer(host(TRAINERS[0]), plugins=[plugin]).fit(module, batches(1))
    assert "Nothing was changed" not in str(refused.value)
    assert str(refused.value).endswith("are bf16 by now: create or load it again")


@pytest.mark.parametrize("plugin_given", [False, True], ids=["by-name", "by-plugin"])
def test_strategies_that_cannot_be_used_are_refused_by_name(pl, plugin_given):
    name = "XLAStrategy"
    # Neither can be installed everywhere, so the connector meets a stand-in of that class.
    connector = host(f"{pl.__name__}.trainer.connectors.accelerator_connector")
    strategy = object.__new__(getattr(connector, name))
    plugin = lightning_bf16.BF16Precision() if plugin_given else None
    half_made = SimpleNamespace(
        _precision_flag="32-true" if plugin_given else "bf16-fp32-master",
        _precision_plugin_flag=plugin,
        strategy=strategy,
    )
    make = connector._AcceleratorConnector._check_and_init_precision
    with pytest.raises(ValueError, match=rf"cannot be used with {name}: .*precision='bf16-true'"):
        make(half_made)


@pytest.mark.parametrize("name", ["XLAStrategy", "XLAFSDPStrategy"])
def test_fabric_refuses_them_too(fabric_package, mode, name):
    connector = host(f"{fabric_package.__name__}.connector")
    half_made = SimpleNamespace(
        _precision_input=mode,
        _precision_instance=None,
        strategy=object.__new__(getattr(connector, name)),
    )
    with pytest.raises(ValueError, match=rf"cannot be used with {name}: .*precision='bf16-true'"):
        connector._Connector._check_and_init_precision(half_made)


# Fabric calls no connect: it would train bf16 weights with the optimizer of torch.optim.
def test_fabric_refuses_the_plugin_of_a_trainer_and_names_its_own(fabric_package):
    trainers = {"lightning.fabric": "pytorch", "lightning_fabric": "pytorch_lightning"}
    plugin = host(f"lightning_bf16.{trainers[fabric_package.__name__]}").BF16Precision()
    own = fabric_package.__name__.rpartition(".")[2]
    said = rf"cannot be used in {fabric_package.__name__}, .* Use lightning_bf16\.{own}\.BF16Prec"
    with pytest.raises(TypeError, match=said):
        fabric_package.Fabric(accelerator="cpu", devices=1, plugins=[plugin])


@pytest.mark.parametrize(
    ("found", "said"),
    [({}, "found none of them"), ({"lightning": "2.4.0"}, "found lightning 2.4.0")],
    ids=["nothing", "too-old"],
)
def test_a_missing_or_old_host_is_named_with_the_version_needed(monkeypatch, found, said):
    monkeypatch.setattr(lightning_bf16, "_installed", lambda: found)
    with pytest.raises(ImportError, match=rf">= 2\.5; {said}. pip install 'lightning>=2.5'"):
        lightning_bf16.register()


@pytest.mark.parametrize("installed", ["lightning", "pytorch_lightning"])
def test_the_plugin_class_is_that_of_the_installed_package(monkeypatch, installed):
    monkeypatch.setattr(lightning_bf16, "_installed", lambda: {installed: "2.6.0"})
    lightning_bf16.register()
    assert lightning_bf16.BF16Precision.__mro__[1].__name__ == "TrainerMixin"
    host_class = lightning_bf16.BF16Precision.__mro__[3]
    assert host_class.__module__.split(".")[0] == installed


def test_a_name_that_the_package_does_not_have_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'BF16Precison'"):
        lightning_bf16.BF16Precison  # noqa: B018


def test_registering_again_changes_nothing(pl):
    connector = host(f"{pl.__name__}.trainer.connectors.accelerator_connector")
    before = connector._AcceleratorConnector._check_and_init_precision
    lightning_bf16.register()
    _patches.on_import(connector)
    assert connector._AcceleratorConnector._check_and_init_precision is before


def test_a_host_that_is_too_old_trains_in_no_other_precision_than_bf16_mode(monkeypatch):
    """As pytorch-lightning 1.9.5, whose connector has another name."""

    class AcceleratorConnector:
        def _check_and_init_precision(self):
            return "its own"

    old = ModuleType("old_host.trainer.connectors.accelerator_connector")
    old.AcceleratorConnector = AcceleratorConnector
    monkeypatch.setitem(sys.modules, "old_host", SimpleNamespace(__version__="1.9.5"))
    why = "the modes need old_host 2.5 or newer, and this is 1.9.5"
    with pytest.raises(ImportError, match=why):
        _patches.on_import(old)
    connector = AcceleratorConnector()
    assert connector._check_and_init_precision() == "its own"
    monkeypatch.setenv("BF16_MODE", "bf16-stochastic")
    with pytest.raises(RuntimeError, match=f"BF16_MODE=bf16-stochastic was asked for, and {why}"):
        connector._check_and_init_precision()
    sys.modules["old_host"].__version__ = "2.9.0"
    with pytest.raises(AttributeError):  # what it lacks is another matter
        _patches.on_import(old)


def test_complex_parameters_of_another_dtype_train_by_the_advice_of_the_refusal(pl, mode):
    def make(dtype):
        def training_step(self, batch, batch_idx):
            spectrum = torch.fft.rfft(self.net[0](batch[0])) * self.filter
            return torch.fft.irfft(spectrum).square().mean()

        def configure(self):
            return torch.optim.Adam(self.parameters())

        module = make_module(pl, training_step=training_step, configure_optimizers=configure)
        module.filter = torch.nn.Parameter(torch.ones(9, dtype=dtype))
        return module

    with pytest.raises(ValueError, match=r"complex128; .* Make it complex64"):
        make_trainer(pl, mode).fit(make(torch.complex128), batches(2))
    advised = make(torch.complex64)
    trainer = make_trainer(pl, mode, gradient_clip_val=0.5)
    trainer.fit(advised, batches(2))
    assert advised.net[0].weight.dtype == torch.bfloat16
    assert advised.filter.dtype == torch.complex64
    assert (advised.filter != 1).any()
    (optimizer,) = trainer.optimizers
    assert optimizer.state[advised.filter]["exp_avg"].dtype == torch.complex64


def test_a_release_candidate_of_a_host_is_as_new_as_its_release(monkeypatch):
    monkeypatch.setattr(lightning_bf16, "_installed", lambda: {"lightning": "2.6rc1"})
    lightning_bf16.register()
