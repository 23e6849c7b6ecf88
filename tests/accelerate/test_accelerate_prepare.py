"""What prepare leaves behind, says, and refuses, in one process."""

from __future__ import annotations

import copy
import logging
import pickle

import pytest
import torch
from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_submodules
from accelerate.utils import AutocastKwargs, find_executable_batch_size
from foreign_cases import sparse_and_dense
from torch import nn

import accelerate_bf16
import torch_bf16
from accelerate_bf16 import BF16RecipeKwargs
from accelerate_bf16.report import show
from torch_bf16 import plugin_api


def test_accelerators_round_trip_at_prepare_changes_no_bit(
    make_accelerator, train, mode, model, batches
):
    accelerator = make_accelerator(mode)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    prepared, wrapped = accelerator.prepare(model, optimizer)
    train(accelerator, prepared, wrapped, batches[:3])
    before = {k: v.clone() for k, v in optimizer.state[model.up.weight].items()}
    another = make_accelerator(mode)
    another.prepare_optimizer(optimizer)
    after = optimizer.state[model.up.weight]
    assert {k: v.dtype for k, v in after.items()} == {k: v.dtype for k, v in before.items()}
    assert all(torch.equal(after[k], v) for k, v in before.items())


def test_preparing_again_changes_nothing(make_accelerator, train, mode, model, batches):
    accelerator = make_accelerator(mode)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    prepared, wrapped = accelerator.prepare(model, optimizer)
    forward = model.forward
    again, wrapped_again = accelerator.prepare(prepared, wrapped)
    assert again is prepared
    assert wrapped_again is wrapped
    assert model.forward == forward
    train(accelerator, again, wrapped_again, batches[:3])


def test_an_optimizer_of_parameters_that_were_replaced_is_refused(make_accelerator, mode, model):
    accelerator = make_accelerator(mode)
    prepared, wrapped = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    prepared.down.weight = nn.Parameter(torch.zeros(1, 16))
    with pytest.raises(torch_bf16.StateMismatchError, match=r"'down.weight' first\) are no longer"):
        accelerator.prepare(prepared, wrapped)
    other = torch.optim.AdamW([prepared.down.weight])
    accelerator.prepare(prepared, wrapped, other)
    # The other one has been prepared by now.
    accelerator.prepare(prepared, wrapped)
    accelerator.prepare(prepared)


def test_what_an_accelerator_without_the_mode_has_prepared_is_converted_too(
    make_accelerator, train, mode, model, batches, caplog
):
    from accelerate.state import AcceleratorState

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    prepared, wrapped = make_accelerator("no").prepare(model, optimizer)
    AcceleratorState._reset_state()
    copied = copy.deepcopy(prepared)
    accelerator = make_accelerator(mode)
    for again in (accelerator.prepare(copied), accelerator.prepare(prepared, wrapped)[0]):
        assert again.up.weight.dtype == torch.bfloat16
        assert again(batches[0][0]).dtype == torch.float32
    assert isinstance(optimizer, torch_bf16.BF16Optimizer)
    assert len(caplog.records) == 2
    train(accelerator, prepared, wrapped, batches[:3])


def test_preparing_the_module_below_ddp_again_wraps_forward_once(make_accelerator, mode, model):
    accelerator = make_accelerator(mode)
    accelerator.prepare(model)
    forward = model.forward
    # Under DDP it is the wrapper that carries this mark.
    del model._is_accelerate_prepared
    accelerator.prepare(model)
    assert model.forward == forward


@pytest.mark.parametrize("make", [torch.optim.LBFGS, torch.optim.SparseAdam])
def test_optimizer_that_cannot_be_converted_raises_and_leaves_all_usable(
    make_accelerator, train, model, batches, make
):
    accelerator = make_accelerator("bf16-stochastic")
    optimizer = make(model.parameters())
    with pytest.raises(
        NotImplementedError,
        match=f"{make.__name__} cannot be converted: .* (Train with LBFGS in|Make the em)",
    ):
        accelerator.prepare(model, optimizer)
    assert model.up.weight.dtype == torch.float32
    assert type(optimizer) is make
    assert accelerator.mixed_precision == "bf16-stochastic"

    good = torch.optim.AdamW(model.parameters(), lr=1e-2)
    prepared, wrapped = accelerator.prepare(model, good)
    train(accelerator, prepared, wrapped, batches[:3])


def test_an_optimizer_of_fp32_parameters_stays_as_it_is(make_accelerator):
    options = accelerate_bf16.BF16RecipeKwargs(keep_fp32=("0",), compute="fp32")
    accelerator = make_accelerator("bf16-stochastic", kwargs_handlers=[options])
    net, (sparse, dense) = sparse_and_dense()
    model, *wrapped = accelerator.prepare(net, sparse, dense)
    accelerator.backward(model(torch.tensor([1])).square().mean())
    for each in wrapped:
        each.step()
    assert type(sparse) is torch.optim.SparseAdam
    assert isinstance(dense, torch_bf16.AdamW)


def test_evaluation_without_an_optimizer(make_accelerator, mode, model, batches):
    accelerator = make_accelerator(mode)
    prepared = accelerator.prepare_model(model.eval(), evaluation_mode=True)
    with torch.no_grad():
        output = prepared(batches[0][0])
    assert output.dtype == torch.float32
    assert model.up.weight.dtype == torch.bfloat16


def test_autocast_context_is_the_modes(make_accelerator, mode, model, batches):
    accelerator = make_accelerator(mode)
    accelerator.prepare(model)
    x = batches[0][0]
    with accelerator.autocast():
        assert torch.is_autocast_enabled("cpu")
        assert not torch.is_autocast_cache_enabled()
        assert model.up(x).dtype == torch.bfloat16
    with accelerator.autocast(AutocastKwargs(enabled=False)):
        assert not torch.is_autocast_enabled("cpu")
    assert torch.is_autocast_cache_enabled()


def test_autocast_reads_the_options_once_and_not_for_every_batch(
    make_accelerator, mode, monkeypatch
):
    accelerator, reads = make_accelerator(mode), []
    read = plugin_api.options_from_environment
    monkeypatch.setattr(
        plugin_api, "options_from_environment", lambda: reads.append(None) or read()
    )
    for _ in range(3):
        with accelerator.autocast():
            pass
    assert len(reads) == 1


def test_autocast_that_the_user_turned_off_stays_off(make_accelerator, mode, model, batches):
    accelerator = make_accelerator(mode, kwargs_handlers=[AutocastKwargs(enabled=False)])
    prepared = accelerator.prepare(model)
    with accelerator.autocast():
        assert not torch.is_autocast_enabled("cpu")
    with pytest.raises(RuntimeError, match=r"'norm.weight' of LayerNorm is a bfloat16 weight"):
        prepared(batches[0][0])


@pytest.mark.parametrize("keep", [True, False])
def test_an_unwrapped_model_and_its_parts_work(make_accelerator, mode, model, batches, keep):
    accelerator = make_accelerator(mode)
    prepared = accelerator.prepare(model)
    x = batches[0][0]
    expected = prepared(x)
    bare = accelerator.unwrap_model(prepared, keep_fp32_wrapper=keep)
    assert bare is model
    for each in (bare, copy.deepcopy(bare), pickle.loads(pickle.dumps(bare))):
        assert torch.equal(each(x), expected)
        assert each.up(x).dtype == torch.float32


@pytest.mark.parametrize(("late", "compute"), [(0, "autocast"), (0, "fp32"), (1, "autocast")])
def test_hooks_that_come_and_go_leave_a_model_as_it_was(
    make_accelerator, model, batches, late, compute
):
    """As ``dispatch_model`` adds them, before ``prepare`` or after it."""
    options = BF16RecipeKwargs(compute=compute)
    accelerator = make_accelerator("bf16-stochastic", kwargs_handlers=[options])
    plain, x = accelerator.prepare(copy.deepcopy(model)).eval(), batches[0][0]
    if late:
        accelerator.prepare(model)
    for part in model.modules():
        add_hook_to_module(part, ModelHook())
    for _ in range(2):
        accelerator.prepare(model.eval())
    in_fp32 = copy.deepcopy(model).float()
    assert torch.equal(in_fp32(x), copy.deepcopy(plain).float()(x))
    for _ in range(2):
        assert torch.equal(model(x), plain(x))
        assert torch.equal(model.batch_norm(model.up(x)), plain.batch_norm(plain.up(x)))
        remove_hook_from_submodules(model)


def test_an_unwrapped_model_keeps_the_decorators_of_its_forward(make_accelerator, mode, batches):
    class Decorated(nn.Linear):
        @torch.no_grad()
        def forward(self, x):
            return super().forward(x)

    accelerator = make_accelerator(mode)
    bare = accelerator.unwrap_model(accelerator.prepare(Decorated(8, 1)), keep_fp32_wrapper=False)
    assert bare.forward.__func__ is Decorated.forward
    assert not bare(batches[0][0]).requires_grad


def test_a_model_of_transformers_is_saved_and_evaluated_after_unwrapping(
    make_accelerator, mode, tmp_path
):
    from tiny_llm import llama
    from transformers import AutoModelForCausalLM

    accelerator = make_accelerator(mode)
    model = llama()
    prepared = accelerator.prepare(model)
    ids = torch.arange(12).reshape(2, 6)
    expected = prepared(input_ids=ids).logits
    bare = accelerator.unwrap_model(prepared, keep_fp32_wrapper=False)
    bare.save_pretrained(tmp_path)
    assert torch.equal(bare(input_ids=ids).logits, expected)
    embedded = bare.get_input_embeddings()(ids)
    assert bare(inputs_embeds=embedded).logits.dtype == embedded.dtype == torch.float32
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert {p.dtype for p in loaded.parameters()} == {torch.bfloat16}


def test_state_dict_for_saving_is_bf16_and_loads_into_a_plain_model(
    make_accelerator, mode, model, tmp_path
):
    accelerator = make_accelerator(mode)
    prepared = accelerator.prepare(model)
    state = accelerator.get_state_dict(prepared)
    assert state["up.weight"].dtype == torch.bfloat16
    torch.save(state, tmp_path / "model.pt")
    plain = type(model)()
    plain.load_state_dict(torch.load(tmp_path / "model.pt", weights_only=True))
    assert torch.equal(plain.up.weight, model.up.weight.float())


def test_wrapped_and_half_precision_models_are_refused_untouched(make_accelerator, mode):
    accelerator = make_accelerator(mode)
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).half())
    with pytest.raises(ValueError, match=r"parameter '1.weight' .* is torch.float16"):
        accelerator.prepare(model)
    assert model[0].weight.dtype == torch.float32
    assert accelerator.mixed_precision == mode


def test_one_line_of_the_report_is_visible_by_default(make_accelerator, mode, model, caplog):
    accelerator = make_accelerator(mode)
    optimizer = torch.optim.AdamW(model.parameters())
    prepared, wrapped = accelerator.prepare(model, optimizer)
    accelerator.prepare(prepared, wrapped)
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith(f"mixed_precision={mode}: 497 parameters (465 bfloat16, 32 float32), ")
    assert "bytes per trained parameter" in line
    assert "backend " in line


def test_trying_batch_sizes_says_the_line_once_and_equal_models_two(make_accelerator, mode, caplog):
    tried = []

    def attempts(accelerator):
        @find_executable_batch_size(starting_batch_size=8)
        def train(batch_size):
            tried.append(batch_size)
            accelerator.free_memory()
            model = nn.Linear(4, 4)
            accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
            if batch_size > 2:
                raise RuntimeError("CUDA out of memory.")

        train()

    attempts(make_accelerator(mode))
    assert tried[0] == 8
    assert tried[-1] <= 2
    assert len(caplog.records) == 1
    accelerator = make_accelerator(mode)
    attempts(accelerator)
    assert len(caplog.records) == 2
    # Beside the last one, which is still in use.
    equal = [nn.Linear(4, 4), nn.Linear(4, 4)]
    for _ in range(2):
        accelerator.prepare(*equal, *(torch.optim.AdamW(each.parameters()) for each in equal))
        assert len({each.getMessage() for each in caplog.records}) == 1
        assert len(caplog.records) == 4
        accelerator.free_memory()


def test_the_line_names_a_recipe_that_is_not_the_modes(make_accelerator, model, caplog):
    optimizer = torch_bf16.AdamW(model.parameters(), recipe="bf16-fp32-master")
    make_accelerator("bf16-stochastic").prepare(model, optimizer)
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith("mixed_precision=bf16-stochastic: bf16-fp32-master: 497 parameters")


def test_accelerate_sees_no_mixed_precision_while_it_prepares(make_accelerator, mode):
    # Its FSDP branches would cast bf16 weights back to fp32 otherwise.
    seen = []
    accelerator = make_accelerator(mode)

    class Spy(nn.Linear):
        def to(self, *args, **kwargs):
            seen.append(accelerator.mixed_precision)
            if len(seen) > 1:
                raise RuntimeError("cannot move")
            return super().to(*args, **kwargs)

    accelerator.prepare(Spy(2, 2))
    with pytest.raises(RuntimeError, match="cannot move"):
        accelerator.prepare(Spy(2, 2))
    assert seen == ["no", "no"]
    assert accelerator.mixed_precision == mode


def test_an_optimizer_without_a_prepared_model_is_said_to_be_one(make_accelerator, model, caplog):
    accelerator = make_accelerator("bf16-stochastic")
    accelerator.prepare(torch.optim.AdamW(model.parameters()))
    accelerator.prepare(model)
    first, second = [record.getMessage() for record in caplog.records]
    assert "AdamW holds parameters of no prepared model; prepare that, too" in first
    assert "497 parameters (465 bfloat16, 32 float32)" in second


def test_modules_without_parameters_are_not_worth_a_line(make_accelerator, mode, caplog):
    make_accelerator(mode).prepare(nn.MSELoss())
    assert not caplog.records


def test_a_reference_model_is_said_to_take_no_moments(make_accelerator, mode, model, caplog):
    make_accelerator(mode).prepare_model(model, evaluation_mode=True)
    (line,) = [record.getMessage() for record in caplog.records]
    assert "497 parameters (465 bfloat16, 32 float32), backend" in line
    assert line.endswith(", no optimizer yet")


def test_a_frozen_model_is_not_said_to_wait_for_an_optimizer(make_accelerator, mode, model, caplog):
    make_accelerator(mode).prepare(model.requires_grad_(False))
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.endswith(", frozen")


def test_the_report_goes_to_stderr_where_logging_is_not_configured(monkeypatch, capsys):
    logger = logging.getLogger("accelerate_bf16")
    monkeypatch.setattr(logger, "propagate", False)
    show("one line")
    assert capsys.readouterr().err == "one line\n"
    monkeypatch.setattr(logger, "level", logging.WARNING)
    logger.manager._clear_cache()
    show("not shown")
    assert not capsys.readouterr().err
    logger.manager._clear_cache()


def test_an_optimizer_that_was_not_prepared_is_warned_about_once(make_accelerator, mode, batches):
    model = make_accelerator(mode).prepare(nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters())
    model(batches[0][0]).mean().backward()
    told = f"AdamW steps over .*{mode}.* give the optimizer to accelerator.prepare"
    with pytest.warns(UserWarning, match=told):
        optimizer.step()
    optimizer.step()
    other = torch.optim.AdamW([torch.ones(1, requires_grad=True)])
    other.step()


@pytest.mark.parametrize("value", ["no", "bf16"])
def test_accelerates_own_modes_are_left_alone(
    make_accelerator, train, model, batches, value, caplog
):
    accelerator = make_accelerator(value)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    prepared, wrapped = accelerator.prepare(model, optimizer)
    train(accelerator, prepared, wrapped, batches[:2])
    assert type(optimizer) is torch.optim.AdamW
    assert model.up.weight.dtype == torch.float32
    assert not caplog.records
