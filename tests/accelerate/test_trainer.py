"""The Hugging Face Trainer, unchanged: the environment or ``optim`` names the mode."""

from __future__ import annotations

import json
import os
import pickle

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from tiny_llm import llama, sequences
from transformers import Trainer, TrainerCallback, TrainingArguments

import torch_bf16
from accelerate_bf16._patches.trainer import OPTIMIZERS, post_init
from torch_bf16 import plugin_api

# Of transformers' own making: arguments that it has renamed, and its scheduler.
pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning:transformers"),
    pytest.mark.filterwarnings("ignore:.*pin_memory.*:UserWarning"),
]


MAJOR = int(transformers.__version__.split(".")[0])
by_the_arguments = pytest.mark.skipif(MAJOR < 5, reason="transformers 4 knows no such argument")


@pytest.fixture
def make_trainer(tmp_path):
    """Makes a Trainer that accumulates, clips, evaluates and saves."""

    def make(model=None, folder="run", **options):
        options = {
            "per_device_train_batch_size": 4,
            "gradient_accumulation_steps": 2,
            "learning_rate": 1e-2,
            "max_steps": 8,
            "logging_steps": 1,
            "eval_strategy": "steps",
            "eval_steps": 4,
            "save_steps": 4,
        } | options
        arguments = TrainingArguments(
            output_dir=str(tmp_path / folder),
            use_cpu=True,
            report_to=[],
            disable_tqdm=True,
            **options,
        )
        data = sequences()
        return Trainer(
            model=llama() if model is None else model,
            args=arguments,
            train_dataset=data,
            eval_dataset=data[:8],
        )

    return make


@pytest.fixture
def launched(monkeypatch, mode):
    """As ``accelerate launch`` and torchrun leave the environment."""
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", mode)
    return mode


def bits(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[k], other[k]) for k in one)


def test_launched_trainer_trains_saves_and_resumes_bit_for_bit(make_trainer, launched, tmp_path):
    trainer = make_trainer()
    trainer.train()
    assert trainer.accelerator.mixed_precision == launched
    assert isinstance(trainer.optimizer.optimizer, torch_bf16.AdamW)
    assert {p.dtype for p in trainer.model.parameters()} == {torch.bfloat16}
    assert trainer.model.model.rotary_emb.inv_freq.dtype == torch.float32
    logs = trainer.state.log_history
    losses = [each["loss"] for each in logs if "loss" in each]
    assert losses[-1] < 0.8 * losses[0]
    # A norm in bf16 has eight significant bits.
    norms = torch.tensor([each["grad_norm"] for each in logs if "grad_norm" in each])
    assert (norms != norms.bfloat16().float()).any()

    saved = load_file(tmp_path / "run" / "checkpoint-8" / "model.safetensors")
    assert {value.dtype for value in saved.values()} == {torch.bfloat16}
    config = json.loads((tmp_path / "run" / "checkpoint-8" / "config.json").read_text())
    assert config["dtype" if MAJOR >= 5 else "torch_dtype"] == "bfloat16"

    resumed = make_trainer(folder="resumed")
    resumed.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-4"))
    assert same(bits(resumed.model), bits(trainer.model))


@pytest.mark.parametrize("brought", [False, True], ids=["its optimizer", "ours"])
def test_a_model_in_bf16_resumes_an_fp32_run_from_its_fp32_weights(
    make_trainer, monkeypatch, tmp_path, brought
):
    make_trainer(max_steps=4).train()
    checkpoint = tmp_path / "run" / "checkpoint-4"
    saved = load_file(checkpoint / "model.safetensors")
    assert {value.dtype for value in saved.values()} == {torch.float32}

    class Weights(TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, optimizer=None, **kwargs):
            self.first = torch_bf16.fp32_state_dict(resumed.model, optimizer.optimizer)
            control.should_training_stop = True

    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16-fp32-master")
    model, callback = llama().bfloat16(), Weights()
    resumed = make_trainer(model, "resumed", max_steps=5, save_strategy="no")
    if brought:
        recipe = torch_bf16.get_recipe("bf16-fp32-master", weights="bf16+fp32")
        torch_bf16.convert(resumed.create_optimizer(), recipe)
    resumed.add_callback(callback)
    resumed.train(resume_from_checkpoint=str(checkpoint))
    assert same({name: callback.first[name] for name in saved}, saved)


def test_training_goes_on_from_the_best_model_and_not_from_stale_masters(make_trainer, launched):
    started = {}

    class Guard(TrainerCallback):
        def on_step_begin(self, args, state, control, model=None, **kwargs):
            started.setdefault("weights", bits(model))

    # "Best" is the worst here, so that it is not the last.
    best = {"metric_for_best_model": "eval_loss", "greater_is_better": True}
    trainer = make_trainer(load_best_model_at_end=True, **best)
    trainer.train()
    assert trainer.state.best_model_checkpoint.endswith("checkpoint-4")
    loaded = bits(trainer.model)
    trainer.add_callback(Guard())
    trainer.args.max_steps = 1
    trainer.args.load_best_model_at_end = False
    for group in trainer.optimizer.param_groups:
        group["initial_lr"] = group["lr"] = 1e-6
    trainer.train()
    assert same(started["weights"], loaded)
    for name, value in bits(trainer.model).items():
        distance = (value.float() - loaded[name].float()).abs()
        assert (distance <= 1e-5 + 2**-7 * loaded[name].float().abs()).all(), name


def with_adapters(saved=None):
    lora = LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=saved)
    return get_peft_model(llama(), lora)


@pytest.mark.parametrize("saved", [None, ["lm_head"]], ids=["lora", "lora and head"])
def test_adapters_that_peft_loads_again_are_those_that_are_trained(
    make_trainer, launched, tmp_path, saved
):
    trainer = make_trainer(with_adapters(saved))
    trainer.train()
    expected, half = bits(trainer.model), str(tmp_path / "run" / "checkpoint-4")
    trainer.train(resume_from_checkpoint=half)
    assert same(bits(trainer.model), expected)
    # It is cast before the adapters are loaded.
    evaluated = make_trainer(with_adapters(saved), folder="resumed")
    evaluated.evaluate()
    evaluated.train(resume_from_checkpoint=half)
    assert same(bits(evaluated.model), expected)


def test_adapters_train_on_from_the_best_ones(make_trainer, launched):
    trainer = make_trainer(with_adapters(["lm_head"]), load_best_model_at_end=True)
    trainer.train()
    best = bits(trainer.model)
    trainer.args.load_best_model_at_end = False
    trainer.train()
    trained = {name for name, p in trainer.model.named_parameters() if p.requires_grad}
    after = bits(trainer.model)
    assert all(not torch.equal(after[name], best[name]) for name in trained)


def test_an_adapter_that_comes_after_the_cast_is_fp32_until_it_is_prepared(make_trainer, launched):
    trainer = make_trainer(with_adapters(), max_steps=1, eval_strategy="no")
    trainer.evaluate()
    trainer.model.add_adapter("other", LoraConfig(r=2, target_modules=["q_proj"]))
    others = [p for name, p in trainer.model.named_parameters() if ".other." in name]
    assert {p.dtype for p in others} == {torch.float32}
    trainer.model.set_adapter("other")
    trainer.train()
    assert {p.dtype for p in others} == {torch.bfloat16}
    assert any(p.any() for name, p in trainer.model.named_parameters() if "lora_B.other" in name)


def test_evaluation_without_training_keeps_rotary_frequencies(make_trainer, launched):
    trainer = make_trainer(bf16_full_eval=True)
    frequencies = trainer.model.model.rotary_emb.inv_freq.clone()
    metrics = trainer.evaluate()
    assert metrics["eval_loss"] == pytest.approx(5.5, abs=0.3)
    assert trainer.model.lm_head.weight.dtype == torch.bfloat16
    assert torch.equal(trainer.model.model.rotary_emb.inv_freq, frequencies)


@by_the_arguments
@pytest.mark.parametrize("optim", ["adamw_bf16_stochastic", "adamw_bf16_fp32_master"])
def test_optim_alone_names_the_mode(make_trainer, optim):
    trainer = make_trainer(optim=optim, bf16=True, max_steps=2, eval_strategy="no")
    trainer.train()
    mode = optim.removeprefix("adamw_").replace("_", "-")
    assert trainer.accelerator.mixed_precision == mode
    assert trainer.optimizer.optimizer.recipe == torch_bf16.get_recipe(mode)
    assert {p.dtype for p in trainer.model.parameters()} == {torch.bfloat16}
    pickled, name = pickle.dumps(trainer.args), trainer.args.optim.name.encode()
    assert pickle.loads(pickled).optim is trainer.args.optim
    # As it is read where this package is not installed, and no such member is found.
    assert pickle.loads(pickled.replace(name, b"?" * len(name))).optim == "adamw_torch"


@by_the_arguments
def test_attribute_of_the_arguments_names_the_mode(tmp_path, mode):
    arguments = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to=[])
    arguments.mixed_precision = mode
    trainer = Trainer(model=llama(), args=arguments, train_dataset=sequences())
    assert trainer.accelerator.mixed_precision == mode


@by_the_arguments
def test_trainers_that_were_made_together_keep_their_modes(make_trainer):
    options = {"max_steps": 1, "eval_strategy": "no"}
    ours = make_trainer(optim="adamw_bf16_stochastic", **options)
    plain = make_trainer(**options)
    last = make_trainer(optim="adamw_bf16_fp32_master", **options)
    for each, dtype in ((ours, torch.bfloat16), (plain, torch.float32), (last, torch.bfloat16)):
        each.train()
        assert {p.dtype for p in each.model.parameters()} == {dtype}


@pytest.mark.parametrize("by_method", [False, True])
def test_optim_that_is_set_later_does_not_train_in_fp32(make_trainer, by_method):
    trainer = make_trainer()
    if by_method:
        trainer.args.set_optimizer(name="adamw_bf16_stochastic", learning_rate=1e-3)
    else:
        trainer.args.optim = "adamw_bf16_stochastic"
    match = r"'adamw_bf16_stochastic' trains in .* after TrainingArguments had settled .*='no'"
    with pytest.raises(ValueError, match=match if MAJOR >= 5 else "after TrainingArguments"):
        trainer.train()


@by_the_arguments
def test_what_contradicts_the_mode_is_refused(make_trainer, monkeypatch):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16-stochastic")
    with pytest.raises(ValueError, match=r"fp16=True cannot be combined with .*bf16-stochastic"):
        make_trainer(fp16=True)
    with pytest.raises(ValueError, match="fp16_full_eval=True cannot be combined with"):
        make_trainer(fp16_full_eval=True)
    with pytest.raises(ValueError, match=r"optim='adamw_bf16_fp32_master' trains in .* Keep one"):
        make_trainer(optim="adamw_bf16_fp32_master")
    with pytest.raises(ValueError, match=r"optim_args='cautious=True' with optim='adamw_bf16_sto"):
        make_trainer(optim="adamw_bf16_stochastic", optim_args="cautious=True")
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16-sr")
    with pytest.raises(ValueError, match="ACCELERATE_MIXED_PRECISION='bf16-sr' is not a mode"):
        make_trainer()


def test_several_gpus_in_one_process_are_refused_before_anything_is_cast(make_trainer, launched):
    """The Trainer wraps the model in nn.DataParallel then, and prepares the optimizer alone."""
    trainer = make_trainer()
    trainer.args._n_gpu = 2
    match = f"{launched}': this process sees 2 GPUs.* --num_processes 2 or torchrun"
    with pytest.raises(NotImplementedError, match=match):
        trainer.train()
    assert {p.dtype for p in trainer.model.parameters()} == {torch.float32}
    # What is no optimizer is prepared alone wherever the model is.
    assert len(trainer.get_eval_dataloader()) > 0
    trainer = make_trainer(trainer.model, max_steps=1)
    trainer.train()
    assert torch.bfloat16 in {p.dtype for p in trainer.model.parameters()}


def test_an_optimizer_of_transformers_own_trains_by_its_own_step(make_trainer, monkeypatch):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16-stochastic")
    trainer = make_trainer(optim="adafactor")
    before = [p.detach().clone() for p in trainer.model.parameters()]
    trainer.train()
    after = list(trainer.model.parameters())
    assert {p.dtype for p in after} == {torch.bfloat16}
    assert any(not torch.equal(one, other) for one, other in zip(before, after, strict=True))
    assert all(torch.isfinite(p).all() for p in after)


@pytest.mark.parametrize("name", ["bf16", "no"])
def test_modes_of_transformers_itself_are_left_alone(make_trainer, name):
    trainer = make_trainer(bf16=name == "bf16")
    assert trainer.accelerator.mixed_precision == name


def test_what_a_model_declares_to_need_fp32_stays_and_computes_in_fp32(make_trainer, launched):
    if not hasattr(transformers, "Ernie4_5_MoeConfig"):
        pytest.skip("this transformers has no Ernie 4.5")
    config = transformers.Ernie4_5_MoeConfig(
        vocab_size=258,
        hidden_size=32,
        intermediate_size=32,
        moe_intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        moe_num_experts=4,
        moe_k=2,
        moe_layer_start_index=1,
        pad_token_id=256,
    )
    model = transformers.Ernie4_5_MoeForCausalLM(config)
    router = model.model.layers[1].mlp.gate
    assert "model.layers.1.mlp.gate.weight" in plugin_api.fp32_parameters(model)
    seen = []
    router.register_forward_hook(lambda module, args, output: seen.append(output[0]))
    trainer = make_trainer(model, max_steps=2, eval_strategy="no")
    trainer.train()
    assert {p.dtype for p in router.parameters()} == {torch.float32}
    assert model.lm_head.weight.dtype == torch.bfloat16
    # Its logits have more bits than a bf16 product would; weights may begin as zeros.
    assert (seen[-1] != seen[-1].bfloat16().float()).any()
    state = trainer.optimizer.optimizer.state[router.weight]
    assert state["exp_avg"].dtype == torch.float32


def test_what_it_saves_loads_as_bf16(make_trainer, monkeypatch, tmp_path):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16-stochastic")
    trainer = make_trainer(max_steps=1)
    trainer.train()
    trainer.save_model(str(tmp_path / "saved"))
    kind = type(trainer.model)
    config = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert config.get("dtype", config.get("torch_dtype")) == "bfloat16"
    if MAJOR >= 5:
        assert kind.from_pretrained(tmp_path / "saved").dtype == torch.bfloat16
    name = "dtype" if MAJOR >= 5 else "torch_dtype"
    loaded = kind.from_pretrained(tmp_path / "saved", **{name: torch.float32})
    assert loaded.dtype == torch.float32


def test_in_transformers_4_other_arguments_may_name_another_mode(monkeypatch):
    """There the environment tells the Accelerator, and what is written there is no launcher's."""

    class Arguments:
        def __init__(self, optim):
            self.optim = optim
            name_the_mode(self)

    name_the_mode = post_init(lambda self: None)
    monkeypatch.delenv("ACCELERATE_MIXED_PRECISION", raising=False)
    for optim, mode in OPTIMIZERS.items():
        assert Arguments(optim).mixed_precision == mode
        assert os.environ["ACCELERATE_MIXED_PRECISION"] == mode
    assert not hasattr(Arguments("adamw_torch"), "mixed_precision")
    assert "ACCELERATE_MIXED_PRECISION" not in os.environ
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16-stochastic")
    assert Arguments("adamw_torch").mixed_precision == "bf16-stochastic"
    assert Arguments("adamw_torch").mixed_precision == "bf16-stochastic"
    with pytest.raises(ValueError, match="asks for 'bf16-stochastic'"):
        Arguments("adamw_bf16_fp32_master")
