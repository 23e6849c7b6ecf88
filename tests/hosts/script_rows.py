"""The scripts of others that `scripts.py` runs: where they lie, and with which options."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["SCRIPTS", "Script"]


@dataclass(frozen=True)
class Script:
    """One script.

    Attributes:
        host: the folder of its sources.
        path: within it.
        options: names in braces are what `script_runner.py` makes.
        fp32: the options that ask for fp32.
        bf16: those that ask for the host's own bf16. They stand in our modes too.
        most: backward passes at which it is ended.
    """

    host: str
    path: str
    options: tuple[str, ...] = ()
    fp32: tuple[str, ...] = ("--mixed_precision", "no")
    bf16: tuple[str, ...] = ("--mixed_precision", "bf16")
    most: int = 40


def _by_feature(name: str, *options: str) -> Script:
    return Script("accelerate", f"examples/by_feature/{name}.py", options)


def _trl(name: str, data: str, *options: str) -> Script:
    model = ("--model_name_or_path", "{llama}", "--dataset_name", data, "--output_dir", "{out}")
    run = ("--max_steps", "12", "--per_device_train_batch_size", "4", "--learning_rate", "1e-3")
    rest = ("--use_cpu", "--report_to", "none", "--logging_steps", "1", "--save_strategy", "no")
    every = (*model, *run, *rest, *options)
    return Script("trl", f"trl/scripts/{name}.py", every, ("--bf16", "False"), ("--bf16", "True"))


def _transformers(name: str, *options: str) -> Script:
    model = ("--model_name_or_path", "{llama}", "--output_dir", "{out}", "--seed", "0")
    run = ("--per_device_train_batch_size", "2", "--learning_rate", "1e-3")
    path, every = f"examples/pytorch/{name}.py", (*model, *run, *options)
    if name.endswith("_no_trainer"):  # it takes no precision but the launcher's
        return Script("transformers", path, every, (), ())
    rest = ("--do_train", "--use_cpu", "--report_to", "none", "--save_strategy", "no")
    return Script("transformers", path, (*every, *rest), ("--bf16", "False"), ("--bf16", "True"))


def _lightning(path: str, *options: str) -> Script:
    # Its Trainers and Fabrics are given the precision where they are made.
    return Script("lightning", f"examples/{path}.py", options, (), ())


def _diffusers(path: str, *options: str) -> Script:
    model = ("--pretrained_model_name_or_path", "{diffusion}", "--lr_warmup_steps", "0")
    run = (
        "--resolution",
        "32",
        "--train_batch_size",
        "2",
        "--max_train_steps",
        "20",
        "--seed",
        "0",
    )
    rest = ("--output_dir", "{out}", "--learning_rate", "1e-3", "--lr_scheduler", "constant")
    return Script("diffusers", f"examples/{path}.py", (*model, *run, *rest, *options))


_CAPTIONED = ("--train_data_dir", "{captioned}")
_ONE_PROMPT = ("--instance_data_dir", "{images}", "--instance_prompt", "a picture")

SCRIPTS = (
    _by_feature("automatic_gradient_accumulation", "--cpu"),
    _by_feature(
        "checkpointing", "--cpu", "--checkpointing_steps", "epoch", "--output_dir", "{out}"
    ),
    _by_feature("cross_validation", "--cpu", "--num_folds", "2"),
    _by_feature("ddp_comm_hook", "--cpu"),
    _by_feature("early_stopping", "--cpu"),
    _by_feature("gradient_accumulation", "--cpu", "--gradient_accumulation_steps", "2"),
    _by_feature("gradient_accumulation_for_autoregressive_models", "--cpu"),
    _by_feature("local_sgd", "--cpu", "--local_sgd_steps", "2"),
    _by_feature("memory", "--cpu"),
    _by_feature("multi_process_metrics", "--cpu"),
    _by_feature("profiler", "--cpu"),
    _by_feature("schedule_free", "--cpu"),
    _by_feature("tracking", "--cpu", "--project_dir", "{out}"),
    _trl("sft", "{text}"),
    _trl("dpo", "{preferences}"),
    _trl("reward", "{preferences}"),
    _trl(
        "grpo",
        "{prompts}",
        *("--reward_funcs", "digit_reward.share_of_digits", "--num_generations", "2"),
        *("--max_completion_length", "8"),
    ),
    _transformers("language-modeling/run_clm", "--dataset_name", "{text}", "--block_size", "32"),
    _transformers("text-classification/run_glue", "--task_name", "mrpc"),
    _transformers("text-classification/run_glue_no_trainer", "--task_name", "mrpc"),
    _lightning("pytorch/basics/transformer"),
    _lightning("pytorch/basics/autoencoder"),
    _lightning("pytorch/basics/backbone_image_classifier"),
    _lightning("pytorch/bug_report/bug_report_model"),
    _lightning("fabric/image_classifier/train_fabric"),
    _lightning("fabric/kfold_cv/train_fabric"),
    _lightning("fabric/language_model/train"),
    _lightning("fabric/reinforcement_learning/train_fabric", "--total-timesteps", "512"),
    _diffusers("text_to_image/train_text_to_image", *_CAPTIONED),
    _diffusers("text_to_image/train_text_to_image_lora", *_CAPTIONED),
    _diffusers("dreambooth/train_dreambooth", *_ONE_PROMPT),
    _diffusers("dreambooth/train_dreambooth_lora", *_ONE_PROMPT),
    _diffusers(
        "textual_inversion/textual_inversion",
        *("--train_data_dir", "{images}", "--placeholder_token", "<one>"),
        *("--initializer_token", "a"),
    ),
    _diffusers(
        "controlnet/train_controlnet",
        *(*_CAPTIONED, "--conditioning_image_column", "other_image"),
    ),
    _diffusers(
        "instruct_pix2pix/train_instruct_pix2pix",
        *(*_CAPTIONED, "--original_image_column", "other_image"),
        *("--edited_image_column", "image", "--edit_prompt_column", "text"),
    ),
    Script(
        "diffusers",
        "examples/unconditional_image_generation/train_unconditional.py",
        (
            *("--model_config_name_or_path", "{diffusion}/alone", "--train_data_dir", "{images}"),
            *("--resolution", "32", "--train_batch_size", "2", "--num_epochs", "3"),
            *("--learning_rate", "1e-3", "--lr_warmup_steps", "0", "--output_dir", "{out}"),
            *("--ddpm_num_inference_steps", "2"),
        ),
    ),
    Script(
        "timm",
        "train.py",
        (
            *("--data-dir", "{classes}", "--model", "resnet10t", "--num-classes", "2"),
            *("--input-size", "3", "32", "32", "--batch-size", "8", "--workers", "1"),
            *("--device", "cpu", "--opt", "adamw", "--lr", "1e-3", "--epochs", "4"),
            *("--warmup-epochs", "0", "--model-ema", "--no-prefetcher", "--output", "{out}"),
        ),
        (),
        ("--amp", "--amp-dtype", "bfloat16"),
    ),
)
