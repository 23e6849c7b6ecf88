"""Everything that is replaced in Accelerate, transformers and peft; ``README.md`` says why.

``bf16_autoload`` calls :func:`on_import` right after one of their modules has been executed, before
other code imports a name from it. Nothing here imports the optimizers until a mode is used.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from bf16_autoload import Patches

from . import accelerator, adapters, clipping, commands, fsdp, local_sgd, state, trainer

__all__ = ["ADDED", "REPLACED", "on_import", "patches"]

patches = Patches()
"""Everything that is currently replaced."""

REPLACED: dict[str, dict[str, Any]] = {
    "accelerate.accelerator": {
        "Accelerator.__init__": accelerator.init,
        "Accelerator.prepare": accelerator.prepare,
        "Accelerator.prepare_model": accelerator.prepare_model,
        "Accelerator.prepare_optimizer": accelerator.prepare_optimizer,
        "Accelerator.autocast": accelerator.autocast,
        "Accelerator.clip_grad_norm_": clipping.clip_grad_norm_,
        "Accelerator.clip_grad_value_": clipping.clip_grad_value_,
        "Accelerator.log": accelerator.log,
        "Accelerator.get_state_dict": accelerator.get_state_dict,
        "Accelerator.save_model": accelerator.save_averages,
        "Accelerator.save_state": accelerator.save_averages,
        "Accelerator.load_state": accelerator.load_state,
    },
    "accelerate.commands.config.config_utils": {"_ask_options": commands.ask_options},
    "accelerate.commands.config.default": {"write_basic_config": commands.write_basic_config},
    "accelerate.commands.test": {"test_command": commands.test_command},
    "accelerate.commands.utils": {
        "CustomArgumentParser.add_argument": commands.add_argument,
        "CustomArgumentGroup.add_argument": commands.add_argument,
    },
    "accelerate.launchers": {"notebook_launcher": commands.notebook_launcher},
    "accelerate.local_sgd": {
        "LocalSGD._sync_and_avg_model_params": local_sgd.sync_and_avg_model_params
    },
    "accelerate.state": {"AcceleratorState.__init__": state.init},
    "accelerate.utils.launch": {
        "prepare_multi_gpu_env": commands.export_mode,
        "prepare_simple_launcher_cmd_env": commands.export_mode,
        "prepare_deepspeed_cmd_env": commands.export_mode,
        "prepare_sagemager_args_inputs": commands.export_mode_to_sagemaker,
    },
    "accelerate.utils.fsdp_utils": {"load_fsdp_optimizer": fsdp.load_fsdp_optimizer},
    "peft.tuners.tuners_utils": {"BaseTuner._cast_adapter_dtype": adapters.cast_adapter_dtype},
    "transformers.integrations.deepspeed": {
        "HfTrainerDeepSpeedConfig.trainer_config_process": trainer.trainer_config_process
    },
    "transformers.trainer": {
        "get_reporting_integration_callbacks": trainer.get_reporting_integration_callbacks,
        "Trainer.create_accelerator_and_postprocess": trainer.create_accelerator_and_postprocess,
        "Trainer.get_optimizer_cls_and_kwargs": trainer.get_optimizer_cls_and_kwargs,
        "Trainer._load_from_checkpoint": trainer.load_from_checkpoint,
        "Trainer.save_model": trainer.save_averages,
        "Trainer._save_checkpoint": trainer.save_averages,
    },
    "transformers.training_args": {"TrainingArguments.__post_init__": trainer.post_init},
}
"""For each module: what is replaced, and the function that makes it from the original."""

ADDED: dict[str, Any] = {
    "accelerate.accelerator": accelerator.add_mixed_precision,
    "accelerate.state": state.add_mixed_precision,
    "accelerate.utils.dataclasses": state.add_modes,
    "accelerate.utils.launch": commands.explain_choices,
    "transformers.training_args": trainer.add_names,
}
"""For each module, the function that adds to its tables."""


def on_import(module: ModuleType) -> None:
    """Make the modes known to a module that ``bf16_autoload.TARGETS`` lists for this package."""
    for path, make in REPLACED.get(module.__name__, {}).items():
        patches.replace(module, path, make)
    if add := ADDED.get(module.__name__):
        add(module, patches)
