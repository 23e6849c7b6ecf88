"""Fabric on one device, in both packages and both modes."""

from __future__ import annotations

import functools
import logging

import pytest
import torch
from lightning_models import batches, host, network
from torch.nn import functional as F

import torch_bf16


@pytest.fixture
def fabric(fabric_package, mode):
    return fabric_package.Fabric(accelerator="cpu", devices=1, precision=mode)


def made(seed=0):
    torch.manual_seed(seed)
    model = network()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def train(fabric, model, optimizer, data):
    losses = []
    for x, y in data:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        fabric.backward(loss)
        optimizer.step()
        losses.append(loss.detach())
    return losses


def test_setup_converts_optimizer_and_module_in_place(fabric, mode):
    network_, adamw = made()
    parameters = list(network_.parameters())
    model, optimizer = fabric.setup(network_, adamw)
    assert optimizer.optimizer is adamw
    assert model.module is network_
    assert isinstance(adamw, torch_bf16.AdamW)
    assert isinstance(optimizer, torch_bf16.AdamW)
    assert adamw.recipe == torch_bf16.get_recipe(mode)
    assert all(p.dtype == torch.bfloat16 for p in parameters)
    assert [id(p) for p in adamw.param_groups[0]["params"]] == [id(p) for p in parameters]


@pytest.mark.parametrize("again", [True, False])
def test_a_compiled_module_is_set_up_whether_fabric_compiles_it_again_or_not(fabric, again):
    """A compiled module without a length raises if it is asked for its truth."""
    linear = torch.nn.Linear(8, 4)
    compiled = torch.compile(linear, backend="eager")
    adamw = torch.optim.AdamW(compiled.parameters(), lr=1e-2)
    model, optimizer = fabric.setup(compiled, adamw, _reapply_compile=again)
    train(fabric, model, optimizer, batches(2))
    assert linear.weight.dtype == torch.bfloat16
    assert isinstance(adamw, torch_bf16.AdamW)
    assert linear.weight in adamw.state


def test_training_lowers_an_fp32_loss(fabric):
    model, optimizer = fabric.setup(*made())
    losses = train(fabric, model, optimizer, batches(2, repeat=20))
    assert {loss.dtype for loss in losses} == {torch.float32}
    assert sum(losses[-2:]) < 0.5 * sum(losses[:2])


def test_outputs_are_fp32_and_inputs_untouched(fabric):
    model = fabric.setup(network())
    x = torch.randn(2, 8)
    output = model(x)
    assert output.dtype == torch.float32
    assert torch.get_default_dtype() == torch.float32
    with fabric.autocast():
        assert torch.zeros(1).dtype == torch.float32
        assert torch.is_autocast_enabled("cpu")


def test_split_setup_equals_joint_setup_bit_for_bit(fabric):
    joint, optimizer = fabric.setup(*made())
    train(fabric, joint, optimizer, batches(3))
    network_, adamw = made()
    split = fabric.setup_module(network_)
    train(fabric, split, fabric.setup_optimizers(adamw), batches(3))
    for one, other in zip(joint.parameters(), split.parameters(), strict=True):
        assert torch.equal(one.view(torch.int16), other.view(torch.int16))


def test_init_module_draws_fp32_weights(fabric):
    with fabric.init_module():
        model = network()
    assert all(p.dtype == torch.float32 for p in model.parameters())


def test_a_scheduler_made_before_setup_goes_on_driving_the_optimizer(fabric):
    model, adamw = made()
    scheduler = torch.optim.lr_scheduler.StepLR(adamw, 1, gamma=0.5)
    model, optimizer = fabric.setup(model, adamw)
    for x, y in batches(2):
        fabric.backward(F.cross_entropy(model(x), y))
        optimizer.step()
        scheduler.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.25e-2)


@pytest.mark.parametrize("how", [{"clip_val": 0.01}, {"max_norm": 0.01}], ids=["value", "norm"])
def test_clip_gradients_clips(fabric, how):
    model, optimizer = fabric.setup(*made())
    x, y = next(iter(batches(1)))
    fabric.backward(F.cross_entropy(model(x), y))
    before = torch_bf16.total_norm(model.parameters())
    returned = fabric.clip_gradients(model, optimizer, **how)
    if "clip_val" in how:
        assert max(p.grad.abs().max() for p in model.parameters()) == torch.tensor(0.01).bfloat16()
    else:
        assert returned.dtype == torch.float32
        assert torch.equal(returned, before)
        norm = torch_bf16.total_norm(model.parameters())
        assert norm.item() == pytest.approx(0.01, rel=4e-3)  # half an ulp of bf16 per gradient


def test_backward_of_the_loss_itself_works_as_in_bf16_true(fabric):
    model, optimizer = fabric.setup(*made())
    x, y = next(iter(batches(1)))
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    assert optimizer.optimizer.state


def test_clipping_a_non_finite_norm_is_an_error_unless_told_otherwise(fabric):
    model, optimizer = fabric.setup(*made())
    model(torch.full((1, 8), float("inf"))).sum().backward()
    bias = model.module[3].bias
    assert bias.grad.isfinite().all()
    with pytest.raises(RuntimeError, match=r"norm of the gradients is nan.*error_if_nonfinite"):
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
    with pytest.raises(RuntimeError, match="non-finite"):
        fabric.clip_gradients(model, optimizer, max_norm=1.0, norm_type=1)
    assert bias.grad.isfinite().all()
    norm = fabric.clip_gradients(model, optimizer, max_norm=1.0, error_if_nonfinite=False)
    assert norm.isnan()


@pytest.mark.parametrize("how", [{"clip_val": 0.01}, {"max_norm": 0.01, "norm_type": 1}], ids=str)
def test_clipping_what_the_program_has_released_is_refused_in_every_way(fabric, how):
    model, optimizer = fabric.setup(*made())
    torch_bf16.release_gradients(model, optimizer)
    ((x, y),) = batches(1)
    fabric.backward(F.cross_entropy(model(x), y))
    with pytest.raises(NotImplementedError, match="nothing is left to clip"):
        fabric.clip_gradients(model, optimizer, **how)


def test_options_of_the_hosts_methods_reach_it(fabric, tmp_path):
    model, optimizer = fabric.setup(*made())
    state = {"model": model, "optimizer": optimizer}
    which = {"model": lambda name, _: name != "0.bias"}
    fabric.save(tmp_path / "part", {**state, "epoch": 3}, filter=which)
    file = torch.load(tmp_path / "part")
    assert file["model"].keys() == model.state_dict().keys() - {"0.bias"}
    with pytest.raises(RuntimeError, match=r"Missing key.*0\.bias"):
        fabric.load(tmp_path / "part", state)
    assert fabric.load(tmp_path / "part", state, strict=False) == {"epoch": 3}


def test_clipping_by_another_norm_is_the_hosts(fabric):
    model, optimizer = fabric.setup(*made())
    x, y = next(iter(batches(1)))
    fabric.backward(F.cross_entropy(model(x), y))
    fabric.clip_gradients(model, optimizer, max_norm=0.01, norm_type="inf")
    largest = max(p.grad.abs().max().item() for p in model.parameters())
    assert largest == pytest.approx(0.01, rel=1e-2)


def test_two_models_with_their_own_optimizers_train_with_names_from_their_modules(fabric, caplog):
    networks = [made(seed) for seed in (0, 1)]
    for model, optimizer in networks:
        caplog.clear()
        with caplog.at_level(logging.INFO):
            model, wrapped = fabric.setup(model, optimizer)
        count = sum(p.numel() for p in model.parameters())
        assert f": {count} parameters ({count} bfloat16)" in caplog.text
        train(fabric, model, wrapped, batches(1))
        assert "'0.weight'" in optimizer.label(0, 0)


def test_an_unknown_precision_gives_the_hosts_own_error_with_our_names(fabric_package):
    with pytest.raises(ValueError, match=r"'bf16-stochastc' is invalid.*'bf16-fp32-master'"):
        fabric_package.Fabric(accelerator="cpu", precision="bf16-stochastc")


def test_an_unsupported_optimizer_is_refused_at_setup(fabric):
    model = network()
    with pytest.raises(
        NotImplementedError, match=r"LBFGS cannot be converted: .* Train with LBFGS in float32"
    ):
        fabric.setup(model, torch.optim.LBFGS(model.parameters()))


@pytest.mark.parametrize("together", [True, False])
def test_an_optimizer_that_is_refused_leaves_the_one_beside_it_as_it_was(fabric, together):
    module, other = network(), network()
    wrapped = module if together else fabric.setup_module(module)
    classes = [torch.optim.SGD, torch.optim.LBFGS]
    optimizers = [c(m.parameters()) for c, m in zip(classes, (wrapped, other), strict=True)]
    setup = functools.partial(fabric.setup, module) if together else fabric.setup_optimizers
    with pytest.raises(NotImplementedError, match="LBFGS cannot be converted"):
        setup(*optimizers)
    assert [type(each) for each in optimizers] == classes
    if together:
        assert {p.dtype for p in module.parameters()} == {torch.float32}


def test_keep_fp32_names_a_part_of_one_module_among_several(fabric_package, mode, monkeypatch):
    """As of a GAN: the module that has it is set up first."""
    monkeypatch.setenv("BF16_KEEP_FP32", "3")
    fabric = fabric_package.Fabric(accelerator="cpu", devices=1, precision=mode)
    model, without = network(), torch.nn.Linear(8, 8)
    optimizers = [torch.optim.SGD(each.parameters()) for each in (model, without)]
    with pytest.raises(ValueError, match=r"'3' matches no module of Linear .*set up that one fi"):
        fabric.setup(without, optimizers[1])
    assert (type(optimizers[1]), without.weight.dtype) == (torch.optim.SGD, torch.float32)
    fabric.setup(model, optimizers[0])
    fabric.setup(without, optimizers[1])
    kept = [p.dtype for each in (without, model) for p in each.parameters()]
    assert kept == [torch.bfloat16] * 6 + [torch.float32] * 2


def test_what_a_compiled_module_keeps_is_named_as_in_the_module_itself(fabric_package, mode):
    family = fabric_package.__name__.rpartition(".")[2]
    plugin = host(f"lightning_bf16.{family}").BF16Precision(mode, keep_fp32=["3"])
    fabric = fabric_package.Fabric(accelerator="cpu", devices=1, plugins=[plugin])
    model = network()
    compiled = fabric.setup(torch.compile(model, backend="eager"), _reapply_compile=False)
    x = torch.randn(2, 8)
    assert torch.equal(model(x), compiled(x))
    assert [p.dtype for p in model.parameters()] == [torch.bfloat16] * 4 + [torch.float32] * 2


def test_one_line_counts_all_modules_of_an_optimizer(fabric, mode, caplog):
    models, scale = [network(), network()], torch.nn.Parameter(torch.ones(()))
    every = [*models[0].parameters(), *models[1].parameters(), scale]
    optimizer = torch.optim.AdamW(every)
    with caplog.at_level(logging.INFO):
        for each in models:
            fabric.setup(each)
        fabric.setup_optimizers(optimizer)
    (line,) = [r.getMessage() for r in caplog.records if "per trained parameter" in r.getMessage()]
    count = sum(p.numel() for p in every) - 1
    assert line.startswith(f"{mode}: {count} parameters ({count} bfloat16)")


def test_other_precisions_of_fabric_are_left_alone(fabric_package, fabric):
    fabric.setup(*made())
    stock = fabric_package.Fabric(accelerator="cpu", devices=1, precision="32-true")
    model, optimizer = stock.setup(*made())
    train(stock, model, optimizer, batches(1))
    assert type(optimizer.optimizer) is torch.optim.AdamW
    assert next(model.parameters()).dtype == torch.float32


def test_an_optimizer_that_was_never_set_up_is_warned_about(fabric):
    model = fabric.setup(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    ((x, y),) = batches(1)
    fabric.backward(F.cross_entropy(model(x), y))
    with pytest.warns(UserWarning, match=r"SGD steps over bfloat16.*Give it to fabric\.setup"):
        optimizer.step()


def test_what_fabric_refuses_to_set_up_again_leaves_the_optimizer_as_it_was(fabric):
    model, optimizer = fabric.setup(*made())
    other = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="passed only once to the `setup` method"):
        fabric.setup(model, other)
    with pytest.raises(ValueError, match="passed only once to the `setup_optimizers` method"):
        fabric.setup_optimizers(other, optimizer)
    assert type(other) is torch.optim.SGD


def test_a_refused_option_of_the_plugin_is_not_blamed_on_the_optimizer(fabric_package, mode):
    family = fabric_package.__name__.rpartition(".")[2]
    plugin = host(f"lightning_bf16.{family}").BF16Precision(mode, keep_fp32=["nonsense"])
    fabric = fabric_package.Fabric(accelerator="cpu", devices=1, plugins=[plugin])
    model, optimizer = made()
    with pytest.raises(ValueError, match=rf"^precision='{mode}': keep_fp32='nonsense'") as refused:
        fabric.setup(model, optimizer)
    assert "32-true" not in str(refused.value)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert type(optimizer) is torch.optim.AdamW


def test_a_wrapper_after_what_it_wraps_leaves_the_steps_to_it(fabric):
    class Around(torch.optim.Optimizer):
        def __init__(self, base):
            super().__init__(base.param_groups, base.defaults)
            self.base_optimizer, self.param_groups = base, base.param_groups

    model = fabric.setup_module(network())
    base = torch.optim.SGD(model.parameters(), lr=0.1)
    fabric.setup_optimizers(base, Around(base))
    assert isinstance(base, torch_bf16.SGD)
